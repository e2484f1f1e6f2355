"""The tree of priorities against a naive twin."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs.replay.priority_tree import PriorityTree


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**32 - 1), rounds=st.integers(1, 6))
def test_sums_minima_and_draws_are_those_of_the_leaves(size: int, seed: int, rounds: int) -> None:
    random = np.random.default_rng(seed)
    tree, twin = PriorityTree(size), np.zeros(size)
    for _ in range(rounds):
        count = int(random.integers(1, 2 * size + 1))
        leaves = random.integers(0, size, count)
        priorities = random.random(count) * 10.0 ** random.integers(-9, 9, count) * (random.random(count) < 0.7)
        tree.set(leaves, priorities)
        for leaf, priority in zip(leaves, priorities, strict=True):
            twin[leaf] = priority
        assert np.array_equal(tree.get(np.arange(size)), twin)
        assert np.isclose(tree.total, twin.sum(), rtol=1e-13)
        assert tree.least == (twin[twin > 0].min() if twin.any() else np.inf)
        if twin.any():
            shares = np.append(random.random(50), [0.0, np.nextafter(1.0, 0)])
            found = tree.find(shares)
            assert (twin[found] > 0).all()
            ends = np.cumsum(twin)
            slack = 1e-12 * ends[-1]
            assert (shares * ends[-1] <= ends[found] + slack).all()
            assert (shares * ends[-1] >= ends[found] - twin[found] - slack).all()


def test_a_million_updates_leave_no_drift() -> None:
    random = np.random.default_rng(0)
    tree, size = PriorityTree(5000), 5000
    for _ in range(1000):
        leaves = random.integers(0, size, 1000)
        tree.set(leaves, np.power(10.0, random.integers(-8, 8, 1000), dtype=np.float64))
    fresh = PriorityTree(size)
    fresh.set(np.arange(size), tree.get(np.arange(size)))
    assert tree.total == fresh.total
    assert tree.least == fresh.least
    shares = random.random(1000)
    assert np.array_equal(tree.find(shares), fresh.find(shares))


def test_an_empty_leaf_is_never_found() -> None:
    tree = PriorityTree(300)
    tree.set(np.array([3, 77, 299]), np.array([1e-300, 1e-300, 1e-300]))
    tree.set(np.array([77]), np.array([0.0]))
    assert set(tree.find(np.linspace(0, 1, 500, endpoint=False)).tolist()) == {3, 299}
    assert tree.least == 1e-300
