"""Settings that change with the number of steps that were trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["scheduled"]


def scheduled(value: float | Sequence[Sequence[float]], step: int) -> float:
    """The value at a step: a number is constant, ``[[0, 1e-3], [100_000, 0]]`` is interpolated linearly."""
    if isinstance(value, int | float):
        return float(value)
    steps, values = zip(*value, strict=True)
    return float(np.interp(step, steps, values))
