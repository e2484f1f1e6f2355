"""Memory for what arrives: pages that are there only once they are written to."""

from __future__ import annotations

import mmap

from rlmesh.wire.envelope import Buffer

_MAPPED_FROM_BYTES = 1 << 20


def room(size: int) -> Buffer:
    """A writable buffer for ``size`` bytes.

    A large `bytearray` is filled with zeros before it can be used, for half a second per 512 MiB in which no other
    thread runs. A mapping is not, and goes back to the system when its last view is gone.

    Raises:
        MemoryError: there is none.
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
        pass  # This kernel has no huge pages; small ones do.
    return memoryview(mapping)
