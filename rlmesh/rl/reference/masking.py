"""Twins of :mod:`rlmesh.rl.masking`, and the array types of this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Tokens = NDArray[np.integer[Any]]


def valid_slots(mask: Mask) -> Iterator[tuple[int, int]]:
    """The (row, time) of each valid slot."""
    return ((b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t])


def masked_mean(x: Array, mask: Mask) -> float:
    """Mean over the valid slots, 0 without any."""
    values = [float(x[b, t]) for b, t in valid_slots(mask)]
    return sum(values) / len(values) if values else 0.0


def masked_whiten(x: Array, mask: Mask, *, shift_mean: bool = True, eps: float = 1e-8) -> Array:
    """(x − mean) / sqrt(population variance + eps), plus the mean unless ``shift_mean``."""
    mean = masked_mean(x, mask)
    variance = masked_mean((np.where(mask, x, mean) - mean) ** 2, mask)
    out = np.zeros(x.shape)
    for b, t in valid_slots(mask):
        out[b, t] = (x[b, t] - mean) / np.sqrt(variance + eps) + (0.0 if shift_mean else mean)
    return out
