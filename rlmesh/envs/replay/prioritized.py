"""A replay buffer that samples transitions in proportion to their priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh.envs.replay.priority_tree import PriorityTree
from rlmesh.envs.replay.uniform import ReplayBuffer
from rlmesh.errors import UsageError

__all__ = ["PrioritizedReplayBuffer"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """Prioritised experience replay (Schaul et al. 2016, arXiv:1511.05952, the proportional variant).

    Transition i is drawn with probability P(i) = p_i^α / Σ p^α, and has the importance weight
    (N · P(i))^-β / max_j (N · P(j))^-β, where N is the number of stored transitions and the maximum is over all of
    them. A new transition has the largest priority so far. Draws are stratified: one from each of n equal shares.

    Args:
        capacity, seed, n_step, gamma, ignored: as in `ReplayBuffer`.
        alpha: exponent α of priorities, from 0, which samples uniformly, to 1.
        beta: exponent β of importance weights; 1 corrects the bias fully.
        eps: added to each priority, so that no transition is lost; at most 1.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self, capacity: int, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6, **options: Any
    ) -> None:
        super().__init__(capacity, **options)
        if not (0 <= alpha <= 1 and 0 <= beta <= 1 and 0 < eps <= 1):
            raise UsageError(
                f"PrioritizedReplayBuffer: alpha and beta must be from 0 to 1, and eps above 0 and at most 1, not "
                f"{alpha}, {beta} and {eps}"
            )
        self.alpha, self.beta, self.eps = float(alpha), float(beta), float(eps)
        self._tree = PriorityTree(self.capacity)
        self._largest = 1.0

    def _written(self, positions: NDArray[np.int64]) -> None:
        self._tree.set(positions, np.full(len(positions), self._largest**self.alpha))

    def sample(self, count: int, beta: float | None = None) -> dict[str, Any]:
        """``count`` transitions with ``weights`` [n] (float32, at most 1) and their numbers ``batch_indexes`` [n].

        Args:
            count: number of transitions.
            beta: the β of these weights; the buffer's own one if left out.

        Raises:
            UsageError: the buffer is empty, or ``beta`` is out of range.
        """
        self._fail_if_empty()
        beta = self.beta if beta is None else float(beta)
        if not 0 <= beta <= 1:
            raise UsageError(f"PrioritizedReplayBuffer: beta must be from 0 to 1, not {beta}")
        positions = self._tree.find((np.arange(count) + self._random.random(count)) / max(count, 1))
        # The largest weight belongs to the least priority, so N and the total cancel.
        weights = (self._tree.get(positions) / self._tree.least) ** -beta
        batch = self._batch(self.oldest + (positions - self.oldest) % self.capacity)
        return {**batch, "weights": weights.astype(np.float32)}

    def update_priorities(self, batch_indexes: ArrayLike, priorities: ArrayLike) -> int:
        """Set the priorities of sampled transitions, usually to their absolute TD errors.

        Transitions that were overwritten since they were sampled are left out: their places hold other ones now.

        Args:
            batch_indexes: the column of the sampled batch [n].
            priorities: finite numbers of at least 0 [n].

        Returns:
            The number of priorities that were set.

        Raises:
            UsageError: lengths differ, or a priority is negative or not finite; nothing is set then.
        """
        numbers = np.asarray(batch_indexes, np.int64).reshape(-1)
        values = np.asarray(priorities, np.float64).reshape(-1)
        if len(numbers) != len(values):
            raise UsageError(f"update_priorities: {len(numbers)} batch_indexes, but {len(values)} priorities")
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise UsageError(
                f"update_priorities: priority {at} is {values[at]}; priorities are finite and at least 0, such as "
                "absolute TD errors. A value that is not finite usually means that the loss has diverged"
            )
        if len(numbers) and numbers.max() >= self.added:
            raise UsageError(
                f"update_priorities: batch_indexes has {numbers.max()}, but only {self.added} transitions were added"
            )
        stored = numbers >= self.oldest
        values = values[stored] + self.eps
        if len(values):
            self._tree.set(numbers[stored] % self.capacity, values**self.alpha)
            self._largest = max(self._largest, float(values.max()))
        return len(values)

    def state(self) -> dict[str, Any]:
        """The state of `ReplayBuffer`, with priorities."""
        order = np.arange(self.oldest, self.added) % self.capacity
        return {**super().state(), "priorities": self._tree.get(order), "largest": self._largest}

    def _restored(self, state: Mapping[str, Any], kept: int) -> None:
        self._tree = PriorityTree(self.capacity)
        priorities = np.asarray(state["priorities"], np.float64)
        self._tree.set(np.arange(self.oldest, self.added) % self.capacity, priorities[len(priorities) - kept :])
        self._largest = float(state["largest"])
