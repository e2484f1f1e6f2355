"""The checksum: what it is, and what it sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.weights.checksum import (
    BLOCK_BYTES,
    TURN_BYTES,
    Sums,
    checksum,
    copy_with_checksum,
    reference,
    share_of,
)

SIZES = [0, 1, 7, 8, 9, 63, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 13, 2 * BLOCK_BYTES + 77,
         TURN_BYTES, TURN_BYTES + BLOCK_BYTES + 9]  # fmt: skip


def some_bytes(size: int, misaligned: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, size + misaligned, dtype=np.uint8)[misaligned:]


@pytest.mark.parametrize("misaligned", [0, 3])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_sum_that_it_says(size: int, misaligned: int) -> None:
    data = some_bytes(size, misaligned)
    target = np.zeros(size + 5, np.uint8)[5:]
    assert checksum(data) == copy_with_checksum(data, target) == reference(data.tobytes())
    np.testing.assert_array_equal(data, target)


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    altered = bytearray(data)
    altered[bit // 8] ^= 1 << bit % 8
    assert reference(bytes(altered)) != reference(data)


def test_words_and_blocks_that_change_places_are_seen() -> None:
    data = some_bytes(3 * BLOCK_BYTES)
    blocks = data.reshape(3, -1)
    for swapped in (blocks[[1, 0, 2]], blocks[[0, 2, 1]], np.roll(data, 8), np.roll(data, 1), data[::-1]):
        assert checksum(np.ascontiguousarray(swapped).reshape(-1)) != checksum(data)
    assert checksum(np.concatenate([data[:-8], np.zeros(8, np.uint8)])) != checksum(data)


@pytest.mark.parametrize("readers", [1, 2, 3, 7])
@pytest.mark.parametrize("size", SIZES)
def test_readers_share_every_byte_and_their_sums_add_up(size: int, readers: int) -> None:
    data = some_bytes(size)
    whole, end = Sums(0, 0), 0
    for reader in range(readers):
        share = share_of(size, reader, readers)
        assert share.start == min(end, share.start) or not size
        found = Sums.of(data[share])
        assert found.weighted == checksum(data[share]) == reference(data[share].tobytes())
        whole, end = whole.then(found, share.start // 8), share.stop
    assert end == size and whole.weighted == reference(data.tobytes())
