"""Checksums of memory: what they are, what they see, and who compares which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rlmesh.errors import WeightSyncError
from rlmesh.weights.arrays import ArraySink
from rlmesh.weights.planning.buckets import Bucket, BucketEntry
from rlmesh.weights.transfer.tensor_bytes import (
    UNIT_BYTES,
    BucketCheck,
    checksum_count,
    checksums,
    copy_with_checksums,
    stage_pieces,
)

SIZES = [0, 1, 8, 4096, UNIT_BYTES - 1, UNIT_BYTES, UNIT_BYTES + 1, 3 * UNIT_BYTES + 77]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def some_bytes(size: int, misaligned: int = 0) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size + misaligned, dtype=np.uint8)[misaligned:]


@pytest.mark.parametrize("misaligned", [0, 3])
@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_of_each_unit(size: int, misaligned: int) -> None:
    data = some_bytes(size, misaligned)
    target = np.zeros(size + 5, np.uint8)[5:]
    plain = data.tobytes()
    cut = [plain[at : at + UNIT_BYTES] for at in range(0, max(1, size), UNIT_BYTES)]
    assert checksums(data) == copy_with_checksums(data, target) == [xxhash.xxh3_64_intdigest(unit) for unit in cut]
    assert len(cut) == checksum_count(size)
    np.testing.assert_array_equal(data, target)


def test_checksums_are_xxh3_of_64_bits() -> None:
    """The value that its specification gives for no bytes at all."""
    assert checksums(np.empty(0, np.uint8)) == [0x2D06800538D394C2]


def test_bits_words_and_units_that_change_are_seen() -> None:
    data = some_bytes(3 * UNIT_BYTES)
    whole = checksums(data)
    rows = data.reshape(3, -1)
    for swapped in (rows[[1, 0, 2]], rows[[0, 2, 1]], np.roll(data, 8), np.roll(data, 1), data[::-1]):
        assert checksums(np.ascontiguousarray(swapped).reshape(-1)) != whole
    for bit in (0, 8 * UNIT_BYTES - 1, 8 * UNIT_BYTES, 8 * data.size - 1):
        altered = data.copy()
        altered[bit // 8] ^= 1 << bit % 8
        assert [i for i, one in enumerate(checksums(altered)) if one != whole[i]] == [bit // 8 // UNIT_BYTES]


def bucket_of(sizes: list[int]) -> Bucket:
    entries = [BucketEntry(f"t{i}", (size,), "uint8", 0, size) for i, size in enumerate(sizes)]
    return Bucket(4, tuple(entries), sum(sizes))


@pytest.mark.parametrize("readers", [1, 2, 3, 7])
def test_readers_of_one_memory_share_every_unit(readers: int) -> None:
    pieces = [some_bytes(size) for size in SIZES]
    which = range(len(pieces))
    sent = [one for piece in pieces for one in checksums(piece)]
    bucket = bucket_of(SIZES)
    checks = [BucketCheck(bucket, pieces, (reader, readers)) for reader in range(readers)]
    for check in checks:
        check.sum_and_compare(which, pieces, sent, shared=True)
    for i, size in enumerate(SIZES):
        for unit in range(checksum_count(size) if size else 0):
            pieces[i][unit * UNIT_BYTES] ^= 1
            complained = []
            for reader, check in enumerate(checks):
                try:
                    check.sum_and_compare(which, pieces, sent, shared=True)
                except WeightSyncError as error:
                    assert f"bucket 4 arrived altered: the checksums of t{i} (1 of {len(SIZES)} tensors)" in str(error)
                    complained.append(reader)
            assert len(complained) == 1, "it is in one reader's share"
            pieces[i][unit * UNIT_BYTES] ^= 1


@pytest.mark.parametrize("sizes", [[7], [0, 7], [7, 0], [0, 5, 0, 0]], ids=str)
def test_who_looks_at_other_memory_sees_that_however_small_it_is(sizes: list[int]) -> None:
    """With eight readers most have no share in so few units."""
    pieces, others = [some_bytes(size) for size in sizes], [some_bytes(size) ^ 1 for size in sizes]
    which = range(len(sizes))
    sent = [one for piece in pieces for one in checksums(piece)]
    for reader in range(8):
        check = BucketCheck(bucket_of(sizes), pieces, (reader, 8))
        check.sum_and_compare(which, pieces, sent, shared=True)
        with pytest.raises(WeightSyncError, match="arrived altered"):
            check.sum_and_compare(which, others, sent, shared=True)


def test_who_copies_compares_everything() -> None:
    pieces = [some_bytes(size) for size in SIZES]
    which = range(len(pieces))
    sent = [one for piece in pieces for one in checksums(piece)]
    check = BucketCheck(bucket_of(SIZES), pieces, (1, 3))
    found = [checksums(piece) for piece in pieces]
    check.compare(which, found, sent)
    check.sum_and_compare(which, pieces, sent, shared=False)
    found[-1][2] ^= 1
    found[3][0] ^= 1
    with pytest.raises(WeightSyncError, match=r"checksums of t3, t7 \(2 of 8 tensors\)"):
        check.compare(which, found, sent)
    check.compare([0, 7], [checksums(pieces[0]), checksums(pieces[7])], sent)
    pieces[5][-1] ^= 1
    with pytest.raises(WeightSyncError, match=r"checksums of t5 \(1 of 8 tensors\)"):
        check.sum_and_compare(which, pieces, sent, shared=False)


@pytest.mark.parametrize("filled", [False, True], ids=["staged", "copied into the sink's memory"])
def test_late_pieces_and_checksums_are_read_once_they_are_ready(filled: bool) -> None:
    """A sink of a GPU is told of a snapshot before it is made."""
    pieces = [some_bytes(size) for size in SIZES]
    truth = [one for piece in pieces for one in checksums(piece)]
    arrays = {name: np.zeros(size, np.uint8) for name, size in zip(bucket_of(SIZES).names, SIZES, strict=True)}
    sink, steps = ArraySink(arrays), list[str]()
    late = [np.zeros_like(piece) for piece in pieces]

    class Open:
        def rooms(self, entries: Sequence[BucketEntry], *, keep: bool) -> Sequence[Any]:
            return [torch.from_numpy(arrays[entry.name]) if filled else None for entry in entries]

        def takes_parts(self) -> bool:
            return False

    def ready() -> None:
        steps.append("ready")
        for place, piece in zip(late, pieces, strict=True):
            place[:] = piece

    def sent() -> list[int]:
        steps.append("checksums")
        return truth if steps == ["ready", "checksums"] else []

    bucket = bucket_of(SIZES)
    check = BucketCheck(bucket, late, (0, 1))
    sink.begin(1)
    stage_pieces(sink, Open(), bucket, late, keep=False, check=check, sent=sent, ready=ready)
    if not filled:
        sink.flip(1)
    assert steps == ["ready", "checksums"]
    assert all((sink.arrays[name] == piece).all() for name, piece in zip(bucket.names, pieces, strict=True))
