"""A replay buffer that samples transitions in proportion to their priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh.envs.replay.priorities import Priorities, number_of_priorities
from rlmesh.envs.replay.uniform import ReplayBuffer

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

    alpha, beta, eps = (number_of_priorities(name) for name in ("alpha", "beta", "eps"))

    def __init__(
        self, capacity: int, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6, **options: Any
    ) -> None:
        super().__init__(capacity, **options)
        self.priorities = Priorities(type(self).__name__, self.capacity, alpha=alpha, beta=beta, eps=eps)

    def _written(self, positions: NDArray[np.int64]) -> None:
        self.priorities.add(positions)

    def sample(self, count: int, beta: float | None = None) -> dict[str, Any]:
        """``count`` transitions with ``weights`` [n] (float32, at most 1) and their numbers ``batch_indexes`` [n].

        Args:
            count: number of transitions.
            beta: the β of these weights; the buffer's own one if left out.

        Raises:
            UsageError: the buffer is empty, or ``beta`` is out of range.
        """
        self._fail_if_empty()
        positions, weights = self.priorities.draw(count, self._random, beta)
        return {**self._batch(self.oldest + (positions - self.oldest) % self.capacity), "weights": weights}

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
        return self.priorities.update(batch_indexes, priorities, oldest=self.oldest, added=self.added)

    def state(self) -> dict[str, Any]:
        """The state of `ReplayBuffer`, with priorities."""
        return {**super().state(), **self.priorities.state(np.arange(self.oldest, self.added) % self.capacity)}

    def _restored(self, state: Mapping[str, Any], kept: int) -> None:
        self.priorities.restore(state, np.arange(self.added - kept, self.added) % self.capacity)
