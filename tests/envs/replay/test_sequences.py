"""Sequence replay: consecutive steps, states at their edges, masks."""

from __future__ import annotations

import numpy as np
import pytest

from rlmesh.envs.replay import SequenceReplayBuffer
from rlmesh.errors import UsageError
from tests.envs.replay.batches import episode, together

LENGTHS = {1: 9, 2: 5, 3: 30}


def filled(capacity: int = 200, burn_in: int = 0, stride: int = 1) -> SequenceReplayBuffer:
    """Episodes in fragments that continue each other; the state of a step is ten times its observation."""
    buffer = SequenceReplayBuffer(capacity, seed=0, length=4, burn_in=burn_in, stride=stride)
    for fragment in (
        together(episode(1, 4, ends=None), episode(2, 5, ends="truncated")),
        together(episode(1, 5, first=4), episode(3, 17, ends=None)),
        episode(3, 13, first=17, ends=None),
    ):
        buffer.add({**fragment, "state_in": {"h": fragment["obs"] * 10}})
    return buffer


@pytest.mark.parametrize(("burn_in", "stride"), [(0, 1), (3, 1), (2, 5)])
@pytest.mark.parametrize("capacity", [26, 200])
def test_sequences_are_consecutive_steps_of_one_episode(burn_in: int, stride: int, capacity: int) -> None:
    batch, steps = filled(capacity, burn_in=burn_in, stride=stride).sample(2000), 4 + burn_in
    seen = set()
    for row in range(2000):
        number, t = (int(value) for value in batch["obs"][row, 0])
        there = min(steps, LENGTHS[number] - t)
        seen.add((number, t))
        assert t % stride == 0
        assert batch["mask"][row].tolist() == [True] * there + [False] * (steps - there)
        assert np.array_equal(batch["learn_mask"][row, burn_in:], batch["mask"][row, burn_in:])
        # The state at the start of an episode needs no warming, so its first steps are learnt.
        warms = batch["mask"][row, :burn_in] if t == 0 else np.zeros(burn_in, bool)
        assert np.array_equal(batch["learn_mask"][row, :burn_in], warms)
        assert batch["t"][row, :there].tolist() == list(range(t, t + there))
        assert (batch["obs"][row, :there, 0] == number).all()
        assert (batch["obs"][row, there:] == 0).all()
        assert batch["state_in"]["h"][row].tolist() == [10 * number, 10 * t]
    every = [(number, t) for number, length in LENGTHS.items() for t in range(0, length, stride)]
    assert seen == set(every) if capacity == 200 else len(seen) > 3


def test_overwritten_steps_begin_no_sequence() -> None:
    buffer = filled(10, stride=3)
    for number in range(4, 40):
        fragment = episode(number, 7)
        buffer.add({**fragment, "state_in": {"h": fragment["obs"] * 10}})
        batch = buffer.sample(60)
        assert batch["batch_indexes"].min() >= buffer.oldest
        assert np.array_equal(batch["state_in"]["h"], batch["obs"][:, 0] * 10)
        assert (batch["t"][:, 0] % 3 == 0).all()


def test_a_restored_buffer_goes_on_exactly() -> None:
    one, other = filled(30, stride=2), SequenceReplayBuffer(30, length=4, stride=2, seed=9)
    one.sample(5)
    other.restore(one.state())
    for _ in range(3):
        left, right = one.sample(20), other.sample(20)
        assert np.array_equal(left["obs"], right["obs"])
        assert np.array_equal(left["mask"], right["mask"])
        for buffer in (one, other):
            fragment = episode(3, 8, first=30)
            buffer.add({**fragment, "state_in": {"h": fragment["obs"] * 10}})


def test_a_stride_without_a_start_is_refused() -> None:
    buffer = SequenceReplayBuffer(10, length=2, stride=7)
    buffer.add(episode(1, 3, first=1, ends=None))
    with pytest.raises(UsageError, match="multiple of stride=7"):
        buffer.sample(1)
