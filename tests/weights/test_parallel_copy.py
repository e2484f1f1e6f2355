"""Threads that copy and sum side by side give what one would."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rlmesh.weights.channels.shm import CHUNK_BYTES, ParallelCopy
from rlmesh.weights.transfer.tensor_bytes import checksums

SIZES = [0, 5, 3 * CHUNK_BYTES + 13, 0, CHUNK_BYTES, 8, CHUNK_BYTES + 8, 1 << 20]


@pytest.fixture(params=[1, 2, 5])
def copier(request: pytest.FixtureRequest) -> Iterator[ParallelCopy]:
    made = ParallelCopy(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("summed", [True, False])
def test_all_of_it_is_copied_and_summed(copier: ParallelCopy, summed: bool) -> None:
    generator = np.random.default_rng(1)
    sources = [generator.integers(0, 256, size, dtype=np.uint8) for size in SIZES]
    targets = [np.zeros(size + 1, np.uint8) for size in SIZES]
    sums = copier.copy([(s, t[: s.size]) for s, t in zip(sources, targets, strict=True)], summed=summed)
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(target[:-1], source)
        assert target[-1] == 0
    assert sums == [checksums(source) if summed else [] for source in sources]


def test_nobody_writes_any_more_when_one_has_failed(copier: ParallelCopy) -> None:
    source, target = np.ones(6 * CHUNK_BYTES, np.uint8), np.zeros(6 * CHUNK_BYTES, np.uint8)
    locked = np.zeros(8, np.uint8)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copier.copy([(np.ones(8, np.uint8), locked), (source, target)], summed=True)
    before = target.copy()
    np.testing.assert_array_equal(target, before)
    assert copier.copy([(source, target)], summed=True) and bool((target == 1).all()), "it can be used again"
