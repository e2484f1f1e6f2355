"""Receive buffers whose pages are allocated on first write."""

from __future__ import annotations

import mmap

from rlmesh.wire.envelope import Buffer

_MAPPED_FROM_BYTES = 1 << 20


def allocate(size: int) -> Buffer:
    """A writable buffer of ``size`` bytes.

    A large `bytearray` is filled with zeros first, which takes half a second per 512 MiB in which no other thread runs.
    A mapping is not, and its memory goes back to the system with its last view.

    Raises:
        MemoryError: there is not enough memory.
    """
    if size < _MAPPED_FROM_BYTES:
        return bytearray(size)
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from None
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # This kernel has no huge pages.
    return memoryview(mapping)
