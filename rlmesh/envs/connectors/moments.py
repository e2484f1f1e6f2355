"""Count, mean and sum of squared deviations of values that arrive in parts, on several runners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["RunningMoments"]


class RunningMoments:
    """Mean and variance of rows, updated by parts and merged exactly (Chan, Golub and LeVeque 1983).

    The merge of the moments of two sets of rows is, up to rounding in float64, that of their union: no row counts
    twice or is weighted by its age.

    Args:
        shape: shape of a row.

    Attributes:
        count: number of rows.
        mean: ``[*shape]``.
        squares: sum of squared deviations from the mean, ``[*shape]``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.squares = np.zeros(shape)

    @property
    def variance(self) -> np.ndarray:
        """The variance of the rows, ``[*shape]``; 0 for fewer than two."""
        variance: np.ndarray = self.squares / max(self.count, 1)
        return variance

    def update(self, rows: np.ndarray) -> None:
        """Add rows ``[n, *shape]``."""
        if len(rows):
            values = rows.astype(np.float64)
            mean = values.mean(axis=0)
            self._add(len(rows), mean, np.square(values - mean).sum(axis=0))

    def merge(self, other: RunningMoments) -> None:
        """Add the rows of other moments."""
        if other.count:
            self._add(other.count, other.mean, other.squares)

    def _add(self, count: int, mean: np.ndarray, squares: np.ndarray) -> None:
        total = self.count + count
        ahead = mean - self.mean
        self.mean = self.mean + ahead * (count / total)
        self.squares = self.squares + squares + np.square(ahead) * (self.count * count / total)
        self.count = total

    def state(self) -> dict[str, Any]:
        """Count, mean and squares, as copies."""
        return {"count": self.count, "mean": self.mean.copy(), "squares": self.squares.copy()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RunningMoments:
        """The moments of a state."""
        moments = cls(np.shape(state["mean"]))
        moments.count = int(state["count"])
        moments.mean, moments.squares = np.array(state["mean"]), np.array(state["squares"])
        return moments
