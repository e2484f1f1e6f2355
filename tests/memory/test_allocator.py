"""Free space of a segment: no two taken ranges overlap, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.memory.segment import FreeSpace


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_taken_ranges_never_overlap_and_all_comes_back(data: st.DataObject) -> None:
    start, end = 7, 7 + data.draw(st.integers(1, 60))
    space = FreeSpace(start, end)
    taken: dict[int, int] = {}
    for _ in range(data.draw(st.integers(0, 40))):
        give = data.draw(st.booleans())
        if taken and give:
            offset = data.draw(st.sampled_from(sorted(taken)))
            space.give(offset, taken.pop(offset))
        else:
            size = data.draw(st.integers(1, 20))
            hole = space.best(size)
            offset_or_none = space.take(size)
            assert (hole is None) == (offset_or_none is None)
            if offset_or_none is not None:
                assert hole is not None and hole[1] == offset_or_none
                taken[offset_or_none] = size
        ranges = sorted((offset, offset + size) for offset, size in taken.items())
        assert all(start <= low and high <= end for low, high in ranges)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
        assert space.free_bytes == end - start - sum(taken.values())
    for offset, size in taken.items():
        space.give(offset, size)
    assert space.is_empty
    assert space.best(end - start) == (end - start, start)


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    space = FreeSpace(0, 100)
    a, _, b, _ = space.take(30), space.take(10), space.take(20), space.take(10)
    assert (a, b) == (0, 40)
    space.give(0, 30)
    space.give(40, 20)
    assert space.best(20) == (20, 40)
    assert space.best(21) == (30, 0)
    assert space.best(31) is None
    assert space.take(20) == 40


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10), (15, 10), (5, 10), (90, 20), (0, 0), (20, 30)])
def test_what_is_free_cannot_be_given_again(offset: int, nbytes: int) -> None:
    space = FreeSpace(0, 100)
    assert space.take(20) == 0
    space.give(0, 10)
    with pytest.raises(ValueError, match="not all in use"):
        space.give(offset, nbytes)
    space.give(10, 10)
    assert space.is_empty
