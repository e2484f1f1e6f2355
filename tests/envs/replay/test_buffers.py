"""Uniform and prioritised replay: what is stored, drawn, refused and restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from rlmesh.errors import UsageError
from tests.envs.replay.batches import episode, together, transitions

BOTH: list[Any] = [ReplayBuffer, PrioritizedReplayBuffer]


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=40, deadline=None)
@given(capacity=st.integers(1, 40), sizes=st.lists(st.integers(0, 90), max_size=8))
def test_the_newest_rows_are_stored_and_every_one_is_drawn(kind: Any, capacity: int, sizes: list[int]) -> None:
    buffer, added = kind(capacity, seed=1), 0
    for size in sizes:
        buffer.add(transitions(added, size))
        added += size
        assert len(buffer) == min(added, capacity)
    if added:
        batch = buffer.sample(60 * len(buffer))
        assert set(batch["obs"][:, 0].astype(int)) == set(range(added - len(buffer), added))
        assert np.array_equal(batch["obs"][:, 0], batch["batch_indexes"])
        assert np.array_equal(batch["rewards"], batch["batch_indexes"] * 0.5)


def test_rows_are_copied() -> None:
    buffer, rows = ReplayBuffer(8, seed=0), transitions(0, 4)
    buffer.add(rows)
    rows["obs"][:] = -1
    batch = buffer.sample(20)
    assert (batch["obs"] >= 0).all()
    batch["obs"][:] = -2
    assert (buffer.sample(20)["obs"] >= 0).all()


def test_dict_and_tuple_observations_keep_their_form() -> None:
    obs = {"camera": np.arange(24, dtype=np.uint8).reshape(6, 2, 2), "joints": (np.arange(6.0), np.arange(6)[:, None])}
    buffer = ReplayBuffer(4, seed=0)
    buffer.add({"obs": obs, "infos": np.array([{}] * 6)})
    batch = buffer.sample(50)
    assert set(batch) == {"obs", "batch_indexes"}
    assert isinstance(batch["obs"]["joints"], tuple)
    assert np.array_equal(batch["obs"]["joints"][0], batch["batch_indexes"])
    assert np.array_equal(batch["obs"]["joints"][1][:, 0], batch["batch_indexes"])
    assert np.array_equal(batch["obs"]["camera"][:, 0, 0], batch["batch_indexes"] * 4)
    assert batch["obs"]["camera"].dtype == np.uint8


@pytest.mark.parametrize("n_step", [2, 3, 5])
@pytest.mark.parametrize("capacity", [11, 64])
def test_n_step_returns_are_those_of_a_loop(n_step: int, capacity: int) -> None:
    """Episodes in turns, in fragments, with both ways to end; the ring is full in one of the cases."""
    buffer = ReplayBuffer(capacity, seed=0, n_step=n_step, gamma=0.9)
    fragments = [
        together(episode(1, 4, ends=None), episode(2, 6, ends="truncated")),
        together(episode(3, 2, ends="terminated"), episode(1, 5, first=4, ends="terminated")),
        together(episode(4, 7, ends=None)),
    ]
    mixed = np.random.default_rng(0).permutation(10)
    fragments[0] = {name: column[mixed] for name, column in fragments[0].items()}
    for fragment in fragments:
        buffer.add(fragment)
    batch = buffer.sample(3000)
    lengths, ends = {1: 9, 2: 6, 3: 2, 4: 7}, {1: "terminated", 2: "truncated", 3: "terminated", 4: None}
    seen = set()
    for row in range(3000):
        number, t = (int(value) for value in batch["obs"][row])
        steps = min(n_step, lengths[number] - t)
        seen.add((number, t))
        assert batch["n_steps"][row] == steps
        wanted = sum(0.9**k * (number + (t + k) / 8) for k in range(steps))
        assert batch["rewards"][row] == pytest.approx(wanted, rel=1e-6)
        assert batch["new_obs"][row].tolist() == [number, t + steps]
        at_end = t + steps == lengths[number]
        assert batch["terminateds"][row] == (at_end and ends[number] == "terminated")
        assert batch["truncateds"][row] == (at_end and ends[number] == "truncated")
        assert batch["actions"][row] == t % 3
    assert len(seen) == min(capacity, 24)


def test_an_episode_with_a_gap_is_not_joined() -> None:
    """A fragment that was lost must not make a transition from one step to a later one."""
    buffer = ReplayBuffer(64, seed=0, n_step=4)
    buffer.add(episode(1, 3, ends=None))
    buffer.add(episode(1, 3, first=5, ends=None))
    batch = buffer.sample(300)
    before = batch["obs"][:, 1] == 2
    assert set(batch["n_steps"][before]) == {1}


def test_steps_in_any_order_are_not_joined_with_rows_that_took_their_place() -> None:
    buffer = ReplayBuffer(4, seed=0, n_step=2, gamma=1.0)
    buffer.add({name: column[::-1] for name, column in episode(1, 2, ends=None).items()})
    assert buffer.sample(50)["n_steps"].max() == 2
    buffer.add(episode(100, 3))  # overwrites step 1 of the first episode, which was added before step 0
    batch = buffer.sample(200)
    old = batch["obs"][:, 0] == 1
    assert old.any()
    assert set(batch["n_steps"][old]) == {1}
    assert set(batch["rewards"][old]) == {1.0}


def test_priorities_give_the_shares_and_weights_of_the_paper() -> None:
    buffer = PrioritizedReplayBuffer(8, alpha=0.5, beta=0.7, seed=3)
    buffer.add(transitions(0, 4))
    priorities = np.array([1.0, 4.0, 9.0, 16.0])
    assert buffer.update_priorities(np.arange(4), priorities) == 4
    batch = buffer.sample(20_000)
    shares = np.sqrt(priorities + buffer.eps) / np.sqrt(priorities + buffer.eps).sum()
    drawn = np.bincount(batch["batch_indexes"], minlength=4) / 20_000
    assert np.allclose(drawn, shares, atol=1e-3)  # stratified: closer than independent draws
    weights = (4 * shares) ** -0.7
    assert np.allclose(batch["weights"], (weights / weights.max())[batch["batch_indexes"]], rtol=1e-6)
    assert np.all(buffer.sample(10, beta=0.0)["weights"] == 1)


def test_a_new_transition_has_the_largest_priority() -> None:
    buffer = PrioritizedReplayBuffer(100, alpha=1.0, seed=0)
    buffer.add(transitions(0, 9))
    buffer.update_priorities(np.arange(9), np.full(9, 3.0))
    buffer.add(transitions(9, 1))
    drawn = np.bincount(buffer.sample(10_000)["batch_indexes"], minlength=10)
    assert np.allclose(drawn, 1000, atol=2)


def test_priorities_of_overwritten_transitions_are_left_out() -> None:
    buffer = PrioritizedReplayBuffer(10, alpha=1.0, seed=0)
    buffer.add(transitions(0, 10))
    sampled = np.arange(10)
    buffer.add(transitions(10, 6))
    assert buffer.update_priorities(sampled, np.full(10, 1000.0)) == 4
    drawn = buffer.sample(5000)["batch_indexes"]
    assert drawn.min() == 6
    assert np.isin(drawn, [6, 7, 8, 9]).mean() > 0.99


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", BOTH)
def test_a_restored_buffer_goes_on_exactly(kind: Any, n_step: int) -> None:
    def go_on(buffer: Any) -> list[Any]:
        seen = []
        for number in range(5, 9):
            batch = buffer.sample(16)
            seen.append(batch)
            if kind is PrioritizedReplayBuffer:
                buffer.update_priorities(batch["batch_indexes"], np.abs(batch["rewards"]))
            buffer.add(episode(number, 4, first=6 if number == 5 else 0))
        return seen

    one = kind(20, seed=5, n_step=n_step)
    one.add(together(*[episode(number, 6, ends=None if number == 5 else "terminated") for number in (1, 2, 3, 4, 5)]))
    one.sample(3)
    state = one.state()
    other = kind(20, seed=77, n_step=n_step)
    other.add(episode(90, 7))
    other.restore(state)
    for left, right in zip(go_on(one), go_on(other), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert np.array_equal(left[name], right[name]), name


def test_a_state_fits_a_buffer_of_another_capacity() -> None:
    buffer = PrioritizedReplayBuffer(20, seed=0)
    buffer.add(transitions(0, 30))
    for capacity, oldest in ((8, 22), (50, 10)):
        other = PrioritizedReplayBuffer(capacity, seed=1)
        other.restore(buffer.state())
        assert len(other) == 30 - oldest
        drawn = other.sample(2000)
        assert set(drawn["batch_indexes"]) == set(range(oldest, 30))
        assert np.array_equal(drawn["obs"][:, 0], drawn["batch_indexes"])
        other.add(transitions(30, 1))
        assert len(other) == min(capacity, 31 - oldest)


def test_seeds_repeat_and_differ() -> None:
    def draws(seed: int) -> list[int]:
        buffer = ReplayBuffer(100, seed=seed)
        buffer.add(transitions(0, 100))
        numbers: list[int] = buffer.sample(20)["batch_indexes"].tolist()
        return numbers

    assert draws(1) == draws(1) != draws(2)


def test_policies_have_buffers_and_seeds_of_their_own() -> None:
    def made(order: list[str]) -> MultiAgentReplayBuffer:
        buffer = MultiAgentReplayBuffer(PrioritizedReplayBuffer, capacity=50, seed=3, alpha=1.0)
        for policy in order:
            buffer.add({policy: transitions(0, 50)})
        return buffer

    one, other = made(["red", "blue"]), made(["blue", "red"])
    left, right = one.sample(10), other.sample(10)
    for policy in ("red", "blue"):
        assert np.array_equal(left[policy]["batch_indexes"], right[policy]["batch_indexes"])
    assert not np.array_equal(left["red"]["batch_indexes"], left["blue"]["batch_indexes"])
    one.update_priorities({"red": (np.arange(49), np.zeros(49))})
    assert set(one.sample(100, ["red"])["red"]["batch_indexes"]) >= {49}
    other.restore(one.state())
    assert np.array_equal(one.sample(9)["red"]["batch_indexes"], other.sample(9)["red"]["batch_indexes"])


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    buffer = ReplayBuffer(10)
    with pytest.raises(UsageError, match="empty; add batches first"):
        buffer.sample(1)
    with pytest.raises(UsageError, match=r"same number of rows.*'obs': 4"):
        buffer.add({"obs": np.zeros((4, 2)), "rewards": np.zeros(3)})
    buffer.add({"obs": np.zeros((4, 2), np.float32), "actions": np.zeros(4, np.int64)})
    with pytest.raises(UsageError, match=r"missing \['actions'\], new \['action'\]"):
        buffer.add({"obs": np.zeros((4, 2)), "action": np.zeros(4)})
    with pytest.raises(UsageError, match=r"actions are float64\[\].*int64\[\]"):
        buffer.add({"obs": np.zeros((4, 2)), "actions": np.zeros(4)})
    with pytest.raises(UsageError, match=r"obs are float64\[3\].*float32\[2\]"):
        buffer.add({"obs": np.zeros((4, 3)), "actions": np.zeros(4, np.int64)})
    assert len(buffer) == 4
    with pytest.raises(UsageError, match=r"lacks the columns \['eps_id', 't'"):
        ReplayBuffer(10, n_step=3).add(transitions(0, 3))
    with pytest.raises(UsageError, match="must be at least 1, not 0"):
        ReplayBuffer(0)
    with pytest.raises(UsageError, match="cannot restore the state of 'ReplayBuffer'"):
        PrioritizedReplayBuffer(10).restore(buffer.state())
    with pytest.raises(UsageError, match="no batch of policy 'red'"):
        MultiAgentReplayBuffer(capacity=3).sample(1, ["red"])


def test_priorities_that_are_no_numbers_are_refused() -> None:
    buffer = PrioritizedReplayBuffer(10, seed=0)
    buffer.add(transitions(0, 10))
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(UsageError, match=r"priority 1 is .*finite and at least 0"):
            buffer.update_priorities([0, 1], [1.0, bad])
    with pytest.raises(UsageError, match="only 10 transitions"):
        buffer.update_priorities([10], [1.0])
    with pytest.raises(UsageError, match="2 batch_indexes, but 1 priorities"):
        buffer.update_priorities([1, 2], [1.0])
    assert np.all(buffer.sample(10)["weights"] == 1)


@pytest.mark.parametrize("kind", BOTH)
def test_numbers_that_do_not_fit_the_type_of_the_first_batch_are_refused(kind: Any) -> None:
    """NumPy would wrap them: 300 became 44."""
    buffer = kind(8, seed=0)
    buffer.add({"obs": np.arange(3, dtype=np.int8)})
    buffer.add({"obs": np.arange(3)})
    with pytest.raises(UsageError, match="obs has numbers that do not fit int8"):
        buffer.add({"obs": np.array([300])})
    assert buffer.added == 6
