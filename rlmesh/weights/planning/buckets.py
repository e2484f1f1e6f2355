"""Buckets: runs of tensors, or of parts of tensors, that are staged and acknowledged together. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from rlmesh.errors import WeightSyncError
from rlmesh.weights.manifest import ITEM_BYTES, Manifest

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One tensor inside a bucket, or a part of it.

    Attributes:
        shape: of the whole tensor.
        dtype: the type in which it is transferred.
        offset: in the bucket, in bytes.
        nbytes: the size of the tensor or part.
        tied: the source's other names for the tensor.
        start: offset of a part in the tensor, in bytes of its C order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    tied: tuple[str, ...] = ()
    start: int = 0

    @property
    def is_part(self) -> bool:
        return self.nbytes != ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of entries.

    Attributes:
        count: the number of buckets that were joined into this one.
        names: of its entries.
        sizes: of its entries, in bytes.
        starts: offsets of the entries in their tensors, in bytes; None: all are 0.
    """

    index: int
    entries: tuple[BucketEntry, ...]
    nbytes: int
    count: int = 1
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    starts: tuple[int, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = tuple(entry.start for entry in self.entries)
        object.__setattr__(self, "names", tuple(entry.name for entry in self.entries))
        object.__setattr__(self, "sizes", tuple(entry.nbytes for entry in self.entries))
        object.__setattr__(self, "starts", starts if any(starts) else None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Rows of plain values are pickled in a fraction of the time that thousands of entries take.
        rows = [(e.name, e.shape, e.dtype, e.offset, e.nbytes, e.tied, e.start) for e in self.entries]
        return _bucket_of, (self.index, rows, self.nbytes, self.count)


def _bucket_of(index: int, rows: Sequence[Any], nbytes: int, count: int) -> Bucket:
    return Bucket(index, tuple(BucketEntry(*row) for row in rows), nbytes, count)


def cut(manifest: Manifest, types: Mapping[str, str], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Whole tensors, in the manifest's order, in buckets of at most ``bucket_bytes``; tied names travel once."""
    if bucket_bytes < 1:
        raise WeightSyncError(f"bucket_bytes={bucket_bytes}: it is a number of bytes, 1 or more")
    buckets: list[Bucket] = []
    entries: list[BucketEntry] = []
    end = 0

    def close() -> None:
        nonlocal entries, end
        if entries:
            buckets.append(Bucket(len(buckets), tuple(entries), end))
        entries, end = [], 0

    tied: dict[str, list[str]] = {}
    for spec in manifest:
        if spec.alias_of is not None:
            tied.setdefault(spec.alias_of, []).append(spec.name)
    for spec in manifest:
        if spec.alias_of is not None:
            continue
        nbytes = spec.numel * ITEM_BYTES[types[spec.name]]
        start = _aligned(end)
        if entries and start + nbytes > bucket_bytes:
            close()
            start = 0
        entries.append(
            BucketEntry(spec.name, spec.shape, types[spec.name], start, nbytes, tuple(tied.get(spec.name, ())))
        )
        end = start + nbytes
    close()
    return tuple(buckets)


def share_out(
    manifest: Manifest, held: Mapping[str, Mapping[str, tuple[int, int]] | None]
) -> dict[str, dict[str, tuple[int, int]]] | None:
    """Rank → tensor → (first, count) of the elements that the rank sends, so that every element is sent once.

    The first of several ranks with equal parts sends them. None if the parts leave gaps or overlap in another way.

    Args:
        held: rank → tensor → (first, count) of the elements that the rank holds, in C order.
    """
    shares: dict[str, dict[str, tuple[int, int]]] = {rank: {} for rank in held}
    for spec in manifest:
        if spec.alias_of is not None:
            continue
        end = 0
        while end < spec.numel:
            fits = ((rank, parts[spec.name]) for rank, parts in held.items() if parts and spec.name in parts)
            found = next(((rank, part) for rank, part in fits if part[0] == end and part[1]), None)
            if found is None:
                return None
            rank, part = found
            shares[rank][spec.name] = part
            end += part[1]
        if end != spec.numel:
            return None
        if not spec.numel:
            shares[next(iter(held))][spec.name] = 0, 0
    return shares


def parts_of(buckets: Sequence[Bucket], share: Mapping[str, tuple[int, int]]) -> tuple[Bucket, ...]:
    """The parts of each bucket that a rank sends; buckets of which it sends nothing are left out."""
    cut = []
    for bucket in buckets:
        entries: list[BucketEntry] = []
        end = 0
        for entry in bucket.entries:
            if entry.name not in share:
                continue
            unit = ITEM_BYTES[entry.dtype]
            first, count = share[entry.name]
            at = _aligned(end)
            entries.append(replace(entry, offset=at, nbytes=count * unit, start=first * unit))
            end = at + count * unit
        if entries:
            cut.append(Bucket(bucket.index, tuple(entries), end))
    return tuple(cut)


def join(buckets: Sequence[Bucket], first_bytes: int, most_bytes: int) -> list[Bucket]:
    """Join runs of neighbours into buckets of at most ``most_bytes``, the first of at most ``first_bytes``.

    A bucket that is larger stays as it is.
    """
    joined: list[Bucket] = []
    run: list[Bucket] = []
    filled = 0
    for bucket in buckets:
        if run and filled + bucket.nbytes > (most_bytes if joined else first_bytes):
            joined.append(join_all(run))
            run, filled = [], 0
        run.append(bucket)
        filled += bucket.nbytes
    return [*joined, join_all(run)] if run else joined


def join_all(run: Sequence[Bucket]) -> Bucket:
    """Join neighbouring buckets into one."""
    if len(run) == 1:
        return run[0]
    entries: list[BucketEntry] = []
    end = 0
    for bucket in run:
        base = _aligned(end)
        entries += [replace(entry, offset=base + entry.offset) for entry in bucket.entries]
        end = base + bucket.nbytes
    return Bucket(run[0].index, tuple(entries), end, len(run))


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT
