"""Calls of libcuda that torch does not offer: memory of one process in another, and batches of copies.

A handle names a whole allocation (``cuMemAlloc``), one segment of torch's allocator, in which a tensor begins
at some offset. Memory of ``expandable_segments:True`` and of ``backend:cudaMallocAsync`` has no handle. Devices are
numbered as torch numbers them. Every call sets torch's own context of the device: a thread that has launched nothing
yet has no context, whatever torch calls its current device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_IN_STREAM_ORDER = 1
_ON_DEVICE = 1
_BESIDE_KERNELS = 1


class DriverError(Exception):
    """A call of the driver failed; ``name`` is the driver's name of the error."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what}: {name}")
        self.name = name


class _MemoryHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int), ("source_kind", ctypes.c_int), ("source_index", ctypes.c_int),
        ("target_kind", ctypes.c_int), ("target_index", ctypes.c_int), ("flags", ctypes.c_uint),
    )  # fmt: skip


_ADDRESS = ctypes.POINTER(ctypes.c_uint64)
_SIZE = ctypes.POINTER(ctypes.c_size_t)
_CALLS: dict[str, list[Any]] = {
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetUuid_v2": [ctypes.POINTER(_Uuid), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemGetAddressRange_v2": [_ADDRESS, _SIZE, ctypes.c_uint64],
    "cuIpcGetMemHandle": [ctypes.POINTER(_MemoryHandle), ctypes.c_uint64],
    "cuIpcOpenMemHandle_v2": [_ADDRESS, _MemoryHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [ctypes.c_uint64],
    "cuMemAlloc_v2": [_ADDRESS, ctypes.c_size_t],
    "cuMemFree_v2": [ctypes.c_uint64],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class CudaDriver:
    """The CUDA driver. Thread-safe; all methods raise DriverError.

    Raises:
        OSError: there is no CUDA driver here.
    """

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        for name, argtypes in _CALLS.items():
            getattr(self._lib, name).argtypes = argtypes
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def uuid(self, index: int) -> str:
        """The UUID of a GPU or of a MIG slice, as nvidia-smi shows it."""
        found = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device(index))
        text = bytes(found.bytes).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    # Memory.

    def export(self, index: int, address: int) -> tuple[bytes, int]:
        """The handle of the allocation that holds an address, and the address's offset in it."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _MemoryHandle()
        with self.context(index):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
        return bytes(handle.reserved), address - base.value

    def open(self, index: int, handle: bytes) -> int:
        """The allocation's address in this process, for kernels of device ``index``; the allocation may be on another
        device.

        Each opening must be closed once.
        """
        if len(handle) != HANDLE_BYTES:
            raise DriverError("cuIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        with self.context(index):
            structure = _MemoryHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, index: int, address: int) -> None:
        with self.context(index):
            self._call("cuIpcCloseMemHandle", address)

    def allocate(self, index: int, nbytes: int) -> int:
        """Allocate memory with its own handle, outside of torch's allocator, and return its address."""
        address = ctypes.c_uint64()
        with self.context(index):
            self._call("cuMemAlloc_v2", ctypes.byref(address), max(nbytes, 1))
        return address.value

    def free(self, index: int, address: int) -> None:
        with self.context(index):
            self._call("cuMemFree_v2", address)

    # Copies.

    @property
    def has_batches(self) -> bool:
        """True if the driver makes many copies in one call (since CUDA 13)."""
        return hasattr(self._lib, "cuMemcpyBatchAsync_v2")

    def batch(self, copies: Sequence[tuple[int, int, int]], source: int, target: int) -> CopyBatch:
        """Copies (to, from, bytes) between two devices' memory, as one batch that can be started repeatedly."""
        return CopyBatch(self, copies, source, target)

    @contextmanager
    def context(self, index: int) -> Iterator[None]:
        """Make the device's primary context, which torch uses, current on the calling thread."""
        context = self._contexts.get(index)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, (text.value or b"").decode() or f"error {code}")


class CopyBatch:
    """A batch of copies; see `CudaDriver.batch`.

    The copy engines make copies of a batch in parallel, so that small copies cost nothing: 339 tensors of 15 GB over
    NVLink take 38.6 ms, where one call per tensor takes 42 to 44 ms (H200).
    """

    def __init__(self, driver: CudaDriver, copies: Sequence[tuple[int, int, int]], source: int, target: int) -> None:
        self._driver, self._device, count = driver, target, len(copies)
        self._count = ctypes.c_size_t(count)
        self._targets = (ctypes.c_uint64 * count)(*[to for to, _, _ in copies])
        self._sources = (ctypes.c_uint64 * count)(*[start for _, start, _ in copies])
        self._sizes = (ctypes.c_size_t * count)(*[nbytes for _, _, nbytes in copies])
        self._attributes = _CopyAttributes(_IN_STREAM_ORDER, _ON_DEVICE, source, _ON_DEVICE, target, _BESIDE_KERNELS)
        self._first = (ctypes.c_size_t * 1)(0)

    def start(self, stream: int) -> None:
        """Start the copies on a stream of the target's device, which must not be the default stream."""
        with self._driver.context(self._device):
            self._driver._call(
                "cuMemcpyBatchAsync_v2", self._targets, self._sources, self._sizes, self._count,
                ctypes.byref(self._attributes), self._first, ctypes.c_size_t(1), ctypes.c_void_p(stream),
            )  # fmt: skip


@cache
def driver() -> CudaDriver:
    """The driver of this process.

    Raises:
        OSError: there is no CUDA driver here.
    """
    return CudaDriver()
