"""A tree of sums and minima over priorities, with 16 children per node; all operations work on arrays.

A changed leaf has its ancestors computed anew from their children instead of changed by a difference, so rounding does
not add up: after any number of updates the tree is the one that the leaves alone would give.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PriorityTree"]

ARITY = 16
"""Children per node: fewer levels than with two, and a node's children lie in two cache lines."""


class PriorityTree:
    """Priorities of ``size`` leaves. A leaf of priority 0 is empty: it is never found, and no minimum counts it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sums: list[NDArray[np.float64]] = []
        self._minima: list[NDArray[np.float64]] = []
        nodes = size
        while not self._sums or nodes > 1:
            nodes = -(-nodes // ARITY)
            self._sums.append(np.zeros((nodes, ARITY)))
            self._minima.append(np.full((nodes, ARITY), np.inf))

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._sums[-1].sum())

    @property
    def least(self) -> float:
        """The smallest priority above 0; infinite in an empty tree."""
        return float(self._minima[-1].min())

    def get(self, leaves: NDArray[np.int64]) -> NDArray[np.float64]:
        """The priorities of leaves [n]."""
        return np.take(self._sums[0].reshape(-1), leaves)

    def set(self, leaves: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """Change the priorities of leaves [n] to finite values of at least 0; of equal leaves, the last one counts."""
        self._sums[0].reshape(-1)[leaves] = priorities
        # Read back, so that equal leaves have the same value in both trees.
        kept = self.get(leaves)
        self._minima[0].reshape(-1)[leaves] = np.where(kept > 0, kept, np.inf)
        nodes = leaves // ARITY
        if len(leaves) > self.size // ARITY:
            nodes = np.unique(nodes)
        for level in range(len(self._sums) - 1):
            self._sums[level + 1].reshape(-1)[nodes] = np.take(self._sums[level], nodes, axis=0).sum(axis=1)
            self._minima[level + 1].reshape(-1)[nodes] = np.take(self._minima[level], nodes, axis=0).min(axis=1)
            nodes = nodes // ARITY

    def find(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """The leaves at shares [n] of the total, each in [0, 1): leaf i has a share of its priority / total."""
        rest = shares * self.total
        found = np.zeros(len(shares), np.int64)
        rows = np.arange(len(shares))
        for level in reversed(self._sums):
            cumulated = np.cumsum(np.take(level, found, axis=0), axis=1)
            # Sums of parents and cumulated sums of children may differ in the last bit. Below the last cumulated sum,
            # the first larger one belongs to a child above 0.
            np.minimum(rest, np.nextafter(cumulated[:, -1], 0), out=rest)
            child = (cumulated <= rest[:, None]).sum(axis=1)
            rest -= np.where(child > 0, cumulated[rows, child - 1], 0.0)
            found = found * ARITY + child
        return found
