"""`Priorities`: draws places of a ring in proportion to a power of their priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh.envs.replay.priority_tree import PriorityTree
from rlmesh.errors import UsageError

__all__ = ["Priorities", "number_of_priorities"]


class Priorities:
    """Priorities of what a buffer draws, by the place of its row (Schaul et al. 2016, the proportional variant).

    Place i is drawn with probability P(i) = p_i^α / Σ p^α, and has the importance weight
    (N · P(i))^-β / max_j (N · P(j))^-β, where N is the number of places with a priority. Draws are stratified: one from
    each of n equal shares.

    Args:
        owner: name of the buffer's class, for errors.
        capacity: number of places.
        alpha, beta: the exponents, from 0 to 1.
        eps: added to each priority, above 0 and at most 1.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(self, owner: str, capacity: int, *, alpha: float, beta: float, eps: float) -> None:
        if not (0 <= alpha <= 1 and 0 <= beta <= 1 and 0 < eps <= 1):
            raise UsageError(
                f"{owner}: alpha and beta must be from 0 to 1, and eps above 0 and at most 1, not {alpha}, {beta} and "
                f"{eps}"
            )
        self.owner, self.capacity = owner, capacity
        self.alpha, self.beta, self.eps = float(alpha), float(beta), float(eps)
        self.clear()

    def clear(self) -> None:
        """Forget all priorities."""
        self._tree, self._largest = PriorityTree(self.capacity), 1.0

    def add(self, places: NDArray[np.int64], drawn: NDArray[np.bool_] | None = None) -> None:
        """Give places the largest priority so far; those that are not to be drawn get none.

        Args:
            drawn: True for places that may be drawn; None: all of them.
        """
        values = np.full(len(places), self._largest**self.alpha)
        self._tree.set(places, values if drawn is None else np.where(drawn, values, 0.0))

    def leave_out(self, places: NDArray[np.int64]) -> None:
        """Let places not be drawn, until `add` or `update` gives them a priority."""
        self._tree.set(places, np.zeros(len(places)))

    @property
    def some(self) -> bool:
        """True if a place can be drawn."""
        return self._tree.total > 0

    def draw(
        self, count: int, random: np.random.Generator, beta: float | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """``count`` places, and their importance weights, at most 1.

        Raises:
            UsageError: ``beta`` is out of range.
        """
        beta = self.beta if beta is None else float(beta)
        if not 0 <= beta <= 1:
            raise UsageError(f"{self.owner}: beta must be from 0 to 1, not {beta}")
        places = self._tree.find((np.arange(count) + random.random(count)) / max(count, 1))
        # The largest weight belongs to the least priority, so N and the total cancel.
        weights = (self._tree.get(places) / self._tree.least) ** -beta
        return places, weights.astype(np.float32)

    def update(self, batch_indexes: ArrayLike, priorities: ArrayLike, *, oldest: int, added: int) -> int:
        """Set the priorities of rows that were drawn, by their numbers; see `PrioritizedReplayBuffer`.

        Args:
            oldest, added: numbers of the oldest row that is stored, and of the next one.
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
        if len(numbers) and numbers.max() >= added:
            raise UsageError(
                f"update_priorities: batch_indexes has {numbers.max()}, but only {added} transitions were added"
            )
        stored = numbers >= oldest
        values = values[stored] + self.eps
        if len(values):
            self._tree.set(numbers[stored] % self.capacity, values**self.alpha)
            self._largest = max(self._largest, float(values.max()))
        return len(values)

    def state(self, places: NDArray[np.int64]) -> dict[str, Any]:
        """The priorities of these places, to the power of α, and the largest one."""
        return {"priorities": self._tree.get(places), "largest": self._largest}

    def restore(self, state: Any, places: NDArray[np.int64]) -> None:
        """Take over the newest priorities of a state, for as many places."""
        self.clear()
        priorities = np.asarray(state["priorities"], np.float64)
        self._tree.set(places, priorities[len(priorities) - len(places) :])
        self._largest = float(state["largest"])


def number_of_priorities(name: str) -> Any:
    """An attribute of a buffer that is a number of its ``priorities``, such as β, which a schedule may change."""
    return property(
        lambda buffer: getattr(buffer.priorities, name), lambda buffer, value: setattr(buffer.priorities, name, value)
    )
