"""The system calls and C functions that shared memory needs, through ctypes, without policy.

Errors are OSError with the kernel's number.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pickle
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Exporter: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

PAGE_BYTES = mmap.PAGESIZE

_MAP_NORESERVE = 0x4000  # the same on all architectures that Python supports on Linux, but not in `mmap` of 3.11
_MADV_DONTNEED = 4
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """A mapping of a file, unmapped with the last reference to this object.

    Code that hands out memory of the mapping must keep a reference for as long as that memory may be used.
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int, protection: int, flags: int) -> None:
        address = _libc.mmap(None, nbytes, protection, flags, fd, offset)
        if address == _MAP_FAILED:
            raise _last_error("mmap")
        self.address: int = address
        self.nbytes = nbytes
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False

    @classmethod
    def shared(cls, fd: int, offset: int, nbytes: int, *, writable: bool) -> Mapping:
        """A mapping of the file's own pages."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return cls(fd, offset, nbytes, protection, mmap.MAP_SHARED)

    @classmethod
    def private(cls, fd: int, offset: int, nbytes: int) -> Mapping:
        """A mapping that shows the file's pages, except that a page written to becomes this process's own copy.

        MAP_POPULATE must not be used: on a writable private mapping it copies every page.
        """
        return cls(fd, offset, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE)

    def drop_private_pages(self, offset: int, nbytes: int) -> None:
        """Drop this process's own copies in a page-aligned range, so that the file's pages show again."""
        if _libc.madvise(self.address + offset, nbytes, _MADV_DONTNEED) != 0:
            raise _last_error("madvise(MADV_DONTNEED)")

    def free_file_pages(self, offset: int, nbytes: int) -> None:
        """Give the memory of a page-aligned range of the file back to the system; the range reads as zeros then."""
        if _libc.madvise(self.address + offset, nbytes, _MADV_REMOVE) != 0:
            raise _last_error("madvise(MADV_REMOVE)")


def export(address: int, nbytes: int, owner: object) -> Exporter:
    """An object whose buffer is that memory, with a reference to ``owner``, which must outlive it.

    Every memoryview, array and tensor that is made from the exporter keeps it alive, so it ends (`on_end`) with the
    last of them.
    """
    exporter = (ctypes.c_ubyte * nbytes).from_address(address)
    vars(exporter)["owner"] = owner
    return exporter


def on_end(exporter: Exporter, callback: Callable[[Any], object], argument: Any) -> None:
    """Call back when no object refers to the memory any more: on any thread, at any moment, even inside a lock."""
    weakref.finalize(exporter, callback, argument).atexit = False


def view_of(exporter: Exporter) -> memoryview:
    """A writable view of bytes; its ``obj`` is the exporter."""
    # memoryview() of a ctypes array has a format that cannot be cast; PickleBuffer exports plain bytes.
    return pickle.PickleBuffer(exporter).raw()


def owner_of(view: memoryview) -> object:
    """The owner of the memory that a view shows; None if the memory is not of an exporter."""
    return getattr(view.obj, "owner", None)


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the C API, part of its stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_PYBUF_SIMPLE = 0
_PYBUF_FULL_RO = 0x11C  # PyBUF_INDIRECT | PyBUF_FORMAT
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None
_to_contiguous = ctypes.pythonapi.PyBuffer_ToContiguous
_to_contiguous.argtypes = [ctypes.c_void_p, ctypes.POINTER(_PyBuffer), ctypes.c_ssize_t, ctypes.c_char]


def address_of(buffer: Any) -> int:
    """The address of a contiguous buffer, valid while the buffer is alive."""
    raw = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(raw), _PYBUF_SIMPLE)
    address = int(raw.buf or 0)
    _release_buffer(ctypes.byref(raw))
    return address


def copy_to(address: int, source: memoryview) -> None:
    """Copy a buffer's items to ``address`` in C order.

    Items that lie in C order already are copied without the GIL at memory speed; others one by one, an order of
    magnitude slower.
    """
    raw = _PyBuffer()
    _get_buffer(source, ctypes.byref(raw), _PYBUF_FULL_RO)
    try:
        if source.c_contiguous:
            _copy(address, raw.buf, raw.len)
        else:
            _to_contiguous(address, ctypes.byref(raw), raw.len, b"C")
    finally:
        _release_buffer(ctypes.byref(raw))


PARALLEL_BYTES = 32 << 20
"""Copies of at least this size are split among cores. One core's memcpy is far below the memory's speed (two cores:
64 MiB at 13.9 instead of 6.7 GB/s, 512 MiB at 20.5 instead of 11.0 on a 2-core virtual machine); a part below 16 MiB is
not worth the 60 microseconds that its thread costs."""
_PART_BYTES = 16 << 20
_MAX_PARTS = 4


def _copy(target: int, source: int, nbytes: int) -> None:
    if nbytes < PARALLEL_BYTES:
        ctypes.memmove(target, source, nbytes)
        return
    parts = min(_MAX_PARTS, nbytes // _PART_BYTES, len(os.sched_getaffinity(0)))
    step = -(-nbytes // parts // PAGE_BYTES) * PAGE_BYTES
    helpers: list[threading.Thread] = []
    begun = step
    try:
        while begun < nbytes:
            # The threads end with this copy: a service that embeds a runtime keeps no thread of rlmesh.
            arguments = (target + begun, source + begun, min(step, nbytes - begun))
            helper = threading.Thread(target=ctypes.memmove, args=arguments, daemon=True)
            helper.start()
            helpers.append(helper)
            begun += step
    except RuntimeError:
        pass  # No more threads can be started: the remaining bytes are copied below.
    try:
        ctypes.memmove(target, source, min(step, nbytes))
        if begun < nbytes:
            ctypes.memmove(target + begun, source + begun, nbytes - begun)
    finally:
        for helper in helpers:
            helper.join()


# Locks of open file descriptions: the kernel drops them when a process dies, however it dies.

_FLOCK = struct.Struct("hhqqi4x")


def try_lock(fd: int, byte: int, *, exclusive: bool) -> bool:
    """Lock one byte of the file, shared or exclusive; False if another lock forbids it."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked_by_others(fd: int, byte: int) -> bool:
    """True if another open file description holds a lock on that byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _last_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), what)
