"""Checksums of bytes in this machine's memory: XXH3 (64 bits, seed 0) by the library xxhash, one for each unit of a
tensor. They guard against torn, stale and misplaced bytes, not against an adversary.

A unit is what is copied and hashed at a time, while it is in the cache. Several threads make those of one tensor side
by side (`crew`), and sinks that look at the same memory share them out. GPUs have a checksum of their own, of whole
tensors (`cuda`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

UNIT_BYTES = 1 << 19


def units(nbytes: int) -> int:
    """How many checksums a tensor has: one for each 512 KiB that are begun; an empty one has one too."""
    return max(1, -(-nbytes // UNIT_BYTES))


def checksum_of_unit(data: Bytes, unit: int) -> int:
    """One of ``[n]`` of uint8, contiguous."""
    return xxhash.xxh3_64_intdigest(data[unit * UNIT_BYTES : (unit + 1) * UNIT_BYTES].data)


def checksums(data: Bytes) -> list[int]:
    """All of ``[n]`` of uint8, contiguous."""
    return [checksum_of_unit(data, unit) for unit in range(units(data.nbytes))]


def copy_with_checksums(source: Bytes, target: Bytes) -> list[int]:
    """Copy bytes, unit by unit, and give the checksums of what was written."""
    import numpy as np

    found = []
    for at in range(0, max(1, source.nbytes), UNIT_BYTES):
        here = slice(at, at + UNIT_BYTES)
        np.copyto(target[here], source[here])
        found.append(xxhash.xxh3_64_intdigest(target[here].data))
    return found
