"""Sequences by priority: shares, weights and priorities against a twin that keeps them in a dict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlmesh.envs.replay import MultiAgentReplayBuffer, PrioritizedSequenceReplayBuffer
from rlmesh.errors import UsageError
from tests.envs.replay.batches import episode, together

BURN_IN, LENGTH = 2, 3


def with_states(fragment: dict[str, Any]) -> dict[str, Any]:
    return {**fragment, "state_in": {"h": fragment["obs"] * 10}}


def filled(capacity: int = 100, **options: Any) -> PrioritizedSequenceReplayBuffer:
    buffer = PrioritizedSequenceReplayBuffer(capacity, length=LENGTH, burn_in=BURN_IN, **{"seed": 0, **options})
    buffer.add(with_states(together(episode(1, 6, ends=None), episode(2, 4), episode(3, 9, ends="truncated"))))
    return buffer


class Twin:
    """Priorities by the number of a sequence's first step, with loops and without a tree."""

    def __init__(self, alpha: float, eps: float, eta: float) -> None:
        self.alpha, self.eps, self.eta, self.largest = alpha, eps, eta, 1.0
        self.of: dict[int, float] = {}

    def add(self, numbers: Any, oldest: int) -> None:
        self.of |= {int(number): self.largest for number in numbers}
        self.of = {number: each for number, each in self.of.items() if number >= oldest}

    def update(self, batch: dict[str, Any], errors: np.ndarray) -> None:
        at = 0
        for i, number in enumerate(batch["batch_indexes"].tolist()):
            own = np.abs(errors[at : at + int(batch["learn_mask"][i].sum())])
            at += len(own)
            if len(own):
                value = self.eta * own.max() + (1 - self.eta) * own.mean() + self.eps
                self.of[number] = value
                self.largest = max(self.largest, value)
            else:
                self.of.pop(number, None)
        assert at == len(errors)

    def shares(self) -> dict[int, float]:
        total = sum(each**self.alpha for each in self.of.values())
        return {number: each**self.alpha / total for number, each in self.of.items()}

    def weights(self, numbers: np.ndarray, beta: float) -> np.ndarray:
        shares, n = self.shares(), len(self.of)
        each = {number: (n * share) ** -beta for number, share in shares.items()}
        largest = max(each.values())
        return np.array([each[number] / largest for number in numbers.tolist()])


@pytest.mark.parametrize("capacity", [12, 100])
@pytest.mark.parametrize(("alpha", "eta"), [(0.9, 0.9), (0.5, 0.0), (1.0, 1.0)])
def test_shares_weights_and_priorities_are_those_of_the_paper(alpha: float, eta: float, capacity: int) -> None:
    rng, twin = np.random.default_rng(1), Twin(alpha, 1e-6, eta)
    buffer = filled(capacity, alpha=alpha, beta=0.6, eta=eta)
    twin.add(range(buffer.added), buffer.oldest)
    first = 6
    for _ in range(6):
        batch = buffer.sample(40)
        assert batch["batch_indexes"].min() >= buffer.oldest
        np.testing.assert_allclose(batch["weights"], twin.weights(batch["batch_indexes"], 0.6), rtol=1e-5)
        assert np.array_equal(batch["state_in"]["h"], batch["obs"][:, 0] * 10)
        kept = np.unique(batch["batch_indexes"], return_index=True)[1]  # each once: the last one of equal ones counts
        batch = {name: column[kept] if name != "state_in" else column for name, column in batch.items()}
        errors = rng.normal(0, 3, int(batch["learn_mask"].sum()))
        buffer.update_from_errors(batch, errors)
        twin.update(batch, errors)
        before = buffer.added
        buffer.add(with_states(episode(1, 3, first=first, ends=None)))
        first += 3
        revived = [number for number in range(buffer.oldest, before) if number not in twin.of]
        ended = ended_within_burn_in(buffer)
        twin.add([*(number for number in revived if number not in ended), *range(before, buffer.added)], buffer.oldest)
    numbers = np.arange(buffer.oldest, buffer.added)
    drawn = np.bincount(buffer.sample(40_000)["batch_indexes"] - buffer.oldest, minlength=len(numbers)) / 40_000
    np.testing.assert_allclose(drawn, [twin.shares().get(number, 0.0) for number in numbers.tolist()], atol=2e-3)


def ended_within_burn_in(buffer: PrioritizedSequenceReplayBuffer) -> set[int]:
    """Numbers of first steps whose episode ended before a step behind the burn-in; those of t = 0 learn at once."""
    store = {name: buffer._store.arrays[(name,)] for name in ("t", "eps_id", "terminateds", "truncateds")}
    found = set()
    for number in range(buffer.oldest, buffer.added):
        place = number % buffer.capacity
        episode_id, t = store["eps_id"][place], store["t"][place]
        for other in range(buffer.oldest, buffer.added):
            at = other % buffer.capacity
            ends = store["terminateds"][at] | store["truncateds"][at]
            if ends and store["eps_id"][at] == episode_id and t > 0 and store["t"][at] - t < BURN_IN:
                found.add(number)
    return found


def test_a_sequence_without_a_step_to_learn_from_waits_for_its_episode() -> None:
    buffer = PrioritizedSequenceReplayBuffer(100, length=LENGTH, burn_in=BURN_IN, seed=0)
    buffer.add(with_states(episode(1, 3, first=4, ends=None)))
    batch = buffer.sample(50)
    buffer.update_from_errors(batch, np.ones(int(batch["learn_mask"].sum())))
    assert set(buffer.sample(50)["batch_indexes"]) == {0}  # those of t = 5 and 6 have no step behind the burn-in
    assert (buffer.sample(50)["weights"] == 1).all()
    buffer.add(with_states(episode(1, 1, first=7)))
    assert set(buffer.sample(50)["batch_indexes"]) == {0, 1, 2, 3}
    batch = buffer.sample(50)
    buffer.update_from_errors(batch, np.ones(int(batch["learn_mask"].sum())))
    buffer.add(with_states(episode(2, 1)))
    assert set(buffer.sample(80)["batch_indexes"]) == {0, 1, 4}  # the others have ended within their burn-in


def test_sequences_that_are_all_too_short_are_drawn_uniformly() -> None:
    buffer = PrioritizedSequenceReplayBuffer(100, length=LENGTH, burn_in=BURN_IN, seed=0)
    buffer.add(with_states(episode(1, 2, first=4)))
    batch = buffer.sample(20)
    assert buffer.update_from_errors(batch, np.zeros(0)) == 0
    batch = buffer.sample(20)
    assert set(batch["batch_indexes"]) == {0, 1}
    assert (batch["weights"] == 1).all()


@pytest.mark.parametrize("capacity", [14, 100])
def test_a_restored_buffer_goes_on_exactly(capacity: int) -> None:
    def go_on(buffer: PrioritizedSequenceReplayBuffer) -> list[dict[str, Any]]:
        seen = []
        for number in range(10, 14):
            batch = buffer.sample(30)
            seen.append({name: each for name, each in batch.items() if name != "state_in"})
            buffer.update_from_errors(batch, batch["rewards"][batch["learn_mask"]])
            buffer.add(with_states(episode(number, 4, ends=None)))
        return seen

    one, other = filled(capacity), filled(capacity, seed=9)
    batch = one.sample(30)
    one.update_from_errors(batch, np.arange(int(batch["learn_mask"].sum()), dtype=float))
    other.restore(one.state())
    for left, right in zip(go_on(one), go_on(other), strict=True):
        for name in left:
            assert np.array_equal(left[name], right[name]), name


def test_steps_between_strides_begin_no_sequence_and_policies_have_priorities_of_their_own() -> None:
    buffer = MultiAgentReplayBuffer(
        PrioritizedSequenceReplayBuffer, capacity=100, seed=1, length=LENGTH, stride=2, alpha=1.0
    )
    buffer.add({name: with_states(episode(1, 8)) for name in ("a", "b")})
    buffer.update_priorities({"a": (np.array([2]), np.array([1000.0]))})
    batches = buffer.sample(500)
    assert set(batches["b"]["batch_indexes"]) == {0, 2, 4, 6}
    assert (batches["a"]["batch_indexes"] == 2).mean() > 0.99


def test_wrong_numbers_are_refused() -> None:
    for options in ({"eta": 2}, {"eta": float("nan")}, {"alpha": 2}, {"eps": 0}):
        with pytest.raises(UsageError, match="PrioritizedSequenceReplayBuffer: "):
            filled(**options)
    with pytest.raises(UsageError, match="beta must be from 0 to 1"):
        filled().sample(1, beta=2)
    with pytest.raises(UsageError, match="PrioritizedSequenceReplayBuffer: nothing to sample"):
        PrioritizedSequenceReplayBuffer(5, length=2).sample(1)
