"""A replay buffer that samples sequences of steps in proportion to their priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh.envs.replay.priorities import Priorities, number_of_priorities
from rlmesh.envs.replay.sequences import SequenceReplayBuffer
from rlmesh.errors import UsageError

__all__ = ["PrioritizedSequenceReplayBuffer"]


class PrioritizedSequenceReplayBuffer(SequenceReplayBuffer):
    """Sequences as of `SequenceReplayBuffer`, each with a priority (Kapturowski et al. 2019, "R2D2", section 2.3).

    The priority of a sequence is η · max |δ| + (1 − η) · mean |δ| of the TD errors δ of its steps behind the burn-in.
    It belongs to the first step of the sequence; a new one has the largest priority so far. Sequences are drawn, and
    have importance weights, as the transitions of a `PrioritizedReplayBuffer`.

    Args:
        capacity, options: as in `SequenceReplayBuffer`.
        alpha, beta, eps: as in `PrioritizedReplayBuffer`.
        eta: η, the share of the largest error, from 0 to 1.

    Raises:
        UsageError: a number is out of range.
    """

    alpha, beta, eps = (number_of_priorities(name) for name in ("alpha", "beta", "eps"))

    def __init__(
        self, capacity: int, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6, eta: float = 0.9,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(capacity, **options)
        if not 0 <= eta <= 1:
            raise UsageError(f"{type(self).__name__}: eta must be from 0 to 1, not {eta}")
        self.eta = float(eta)
        self.priorities = Priorities(type(self).__name__, self.capacity, alpha=alpha, beta=beta, eps=eps)
        self._too_short = np.zeros(0, np.int64)  # numbers of first steps; their episodes may go on

    def _written(self, positions: NDArray[np.int64]) -> None:
        super()._written(positions)
        if len(self._too_short):
            self.priorities.add(self._too_short[self._too_short >= self.oldest] % self.capacity)
            self._too_short = self._too_short[:0]
        self.priorities.add(positions, self._store.arrays[("t",)][positions] % self.stride == 0)

    def sample(self, count: int, beta: float | None = None) -> dict[str, Any]:
        """``count`` sequences as of `SequenceReplayBuffer.sample`, with ``weights`` [n] (float32, at most 1).

        Args:
            count: number of sequences.
            beta: the β of these weights; the buffer's own one if left out.

        Raises:
            UsageError: no stored step may begin a sequence, or ``beta`` is out of range.
        """
        self._fail_if_empty()
        if not self.priorities.some:  # all sequences end within their burn-in so far
            return {**super().sample(count), "weights": np.ones(count, np.float32)}
        positions, weights = self.priorities.draw(count, self._random, beta)
        return {**self._sequences(self.oldest + (positions - self.oldest) % self.capacity), "weights": weights}

    def priorities_of(self, td_errors: ArrayLike, learn_mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The priorities of sequences [n], by the TD errors of their steps.

        Args:
            td_errors: of the steps where ``learn_mask`` is true, sequence by sequence, in the order of time.
            learn_mask: the column of the sampled batch [n, time].

        Returns:
            η · max |δ| + (1 − η) · mean |δ|; 0 for a sequence that ends within its burn-in.
        """
        errors = np.zeros(learn_mask.shape)
        errors[learn_mask] = np.abs(np.asarray(td_errors, np.float64))
        mean = errors.sum(1) / np.maximum(learn_mask.sum(1), 1)
        priorities: NDArray[np.float64] = self.eta * errors.max(1) + (1 - self.eta) * mean
        return priorities

    def update_from_errors(self, batch: Mapping[str, Any], td_errors: ArrayLike) -> int:
        """Set the priorities of a sampled batch by the TD errors of its steps; see `priorities_of`.

        A sequence that ends within its burn-in has no errors. It is not drawn again, unless its episode goes on.

        Returns:
            The number of priorities that were set.
        """
        learn, numbers = batch["learn_mask"], batch["batch_indexes"]
        some = learn.any(1)
        count = self.update_priorities(numbers[some], self.priorities_of(td_errors, learn)[some])
        short = ~some & (numbers >= self.oldest)
        self.priorities.leave_out(numbers[short] % self.capacity)
        last = np.maximum(batch["mask"].sum(1) - 1, 0), np.arange(len(numbers))
        ended = (batch["terminateds"] | batch["truncateds"])[last[1], last[0]]
        self._too_short = np.unique(np.concatenate([self._too_short, numbers[short & ~ended]]))
        return count

    def update_priorities(self, batch_indexes: ArrayLike, priorities: ArrayLike) -> int:
        """Set the priorities of sampled sequences, usually to those of `priorities_of`; otherwise as
        `PrioritizedReplayBuffer.update_priorities`."""
        return self.priorities.update(batch_indexes, priorities, oldest=self.oldest, added=self.added)

    def state(self) -> dict[str, Any]:
        """The state of `SequenceReplayBuffer`, with priorities."""
        priorities = self.priorities.state(np.arange(self.oldest, self.added) % self.capacity)
        return {**super().state(), **priorities, "too_short": self._too_short.copy()}

    def _restored(self, state: Mapping[str, Any], kept: int) -> None:
        self.priorities.clear()
        self._too_short = np.zeros(0, np.int64)
        super()._restored(state, kept)
        self.priorities.restore(state, np.arange(self.added - kept, self.added) % self.capacity)
        self._too_short = np.array(state["too_short"], np.int64)
