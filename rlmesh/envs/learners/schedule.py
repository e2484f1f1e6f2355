"""Settings that change with the number of steps that were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

__all__ = ["schedule_problem", "scheduled"]


def scheduled(value: float | Sequence[Sequence[float]], step: int) -> float:
    """The value at a step: a number is constant, ``[[0, 1e-3], [100_000, 0]]`` is interpolated linearly."""
    if isinstance(value, int | float):
        return float(value)
    steps, values = zip(*value, strict=True)
    return float(np.interp(step, steps, values))


def schedule_problem(name: str, value: object) -> str | None:
    """The fault of a value that is neither a number nor a schedule; None if it is fine."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None
    try:
        points = [(float(step), float(each)) for step, each in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        points = []
    if points and points[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(points)):
        return None
    return f"{name}: a number, or points [[0, value], [step, value], …] with growing steps, not {value!r}"
