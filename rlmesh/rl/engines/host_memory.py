"""Memory of the host that is fast to copy to and from a GPU, and fast to make.

A GPU copies at full speed only to and from page-locked ("pinned") memory. torch makes such memory with one thread and
pages of 4 KiB, about 1.5 GB a second. Here, several threads make huge pages, and CUDA locks them all at once: about
15 GB a second with eight threads.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["KeptRooms", "empty_on_host", "make_rooms"]

HUGE_PAGE = 2 << 20
LEAST_BYTES = 8 * HUGE_PAGE
"""Less than this comes from torch, whose memory has no pages of its own."""
MOST_THREADS = 8
ALIGNMENT = 512
"""Each room begins at a multiple of this, so that it can be viewed as any type."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def make_rooms(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Allocate host memory in one piece, which is freed with the last of its rooms.

    Args:
        sizes: bytes of each room.
        pinned: lock the pages for a GPU.

    Returns:
        per size a tensor ``[size]`` of uint8, with any content.
    """
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    begins = [0, *itertools.accumulate(padded)]
    whole = _allocate(begins[-1], pinned=pinned)
    return [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def empty_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate a contiguous host tensor of the same shape and type for each tensor; pinned for those on a GPU."""
    rooms = [
        iter(make_rooms([tensor.nbytes for tensor in tensors if tensor.is_cuda is pinned], pinned=pinned))
        for pinned in (False, True)
    ]
    return [next(rooms[tensor.is_cuda]).view(tensor.dtype).view(tensor.shape) for tensor in tensors]


class KeptRooms:
    """Pinned rooms for the bytes of storages on a GPU, which are kept for the next time that the storages ask."""

    def __init__(self) -> None:
        self._rooms: dict[int, Tensor] = {}

    def of(self, storages: Sequence[torch.UntypedStorage]) -> list[Tensor]:
        """A room of its size for each storage. The rooms of storages that are not asked for are given up."""
        kept = {
            storage._cdata: room
            for storage in storages
            if (room := self._rooms.get(storage._cdata)) is not None and len(room) == storage.nbytes()
        }
        new = [storage for storage in storages if storage._cdata not in kept]
        self._rooms = kept  # what was given up is freed before more is made
        made = make_rooms([storage.nbytes() for storage in new], pinned=True)
        kept.update((storage._cdata, room) for storage, room in zip(new, made, strict=True))
        return [kept[storage._cdata] for storage in storages]


def _allocate(size: int, *, pinned: bool) -> Tensor:
    if not pinned or size < LEAST_BYTES:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned and size > 0)
    length = -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE  # the first huge page begins inside
    mapped = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if mapped in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise MemoryError(f"no {size} bytes of host memory for the copy of a GPU's: {os.strerror(number)}")
    begin = -(-mapped // HUGE_PAGE) * HUGE_PAGE
    # Advice that the system does not take costs time, not correctness.
    _libc.madvise(mapped, length, mmap.MADV_HUGEPAGE)
    # A child that shares locked pages would have them copied at its fork.
    _libc.madvise(mapped, length, mmap.MADV_DONTFORK)
    _make_pages(begin, size)
    error = torch.cuda.cudart().cudaHostRegister(begin, size, 0)
    if error.value:
        _libc.munmap(mapped, length)
        raise MemoryError(f"CUDA cannot lock {size} bytes of host memory: {error}")
    owner = (ctypes.c_uint8 * size).from_address(begin)
    weakref.finalize(owner, _free, os.getpid(), begin, mapped, length).atexit = False  # the process's end frees it
    return torch.frombuffer(owner, dtype=torch.uint8)


def _make_pages(begin: int, size: int) -> None:
    """Write to all pages, by several threads."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    share = -(-size // (threads * HUGE_PAGE)) * HUGE_PAGE
    with ThreadPoolExecutor(threads) as pool:
        for at in range(0, size, share):
            pool.submit(ctypes.memset, begin + at, 0, min(share, size - at))


def _free(maker: int, begin: int, mapped: int, length: int) -> None:
    if os.getpid() == maker:  # a forked child does not have this memory
        torch.cuda.cudart().cudaHostUnregister(begin)
        _libc.munmap(mapped, length)
