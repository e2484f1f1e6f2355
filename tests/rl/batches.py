"""Random batches for property tests, and poison for their masked slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """A mask ``[batch, time]`` with any pattern, and a seed for the values."""

    mask: NDArray[np.bool_]
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.shape

    def normal(self, stream: int, *more: int) -> NDArray[np.float64]:
        """Standard normal values ``[batch, time, *more]``; another stream gives others."""
        return np.random.default_rng([self.seed, stream]).normal(size=(*self.shape, *more))


@st.composite
def batches(draw: st.DrawFn, min_valid: int = 0) -> Batch:
    rows, times = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * times, max_size=rows * times))
    mask = np.array(bits, dtype=np.bool_).reshape(rows, times)
    assume(int(mask.sum()) >= min_valid)
    return Batch(mask, draw(st.integers(0, 2**31)))


def poisoned(x: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A copy whose masked slots hold NaN, +inf and −inf in turn."""
    bad = np.resize(np.array([np.nan, np.inf, -np.inf]), x.shape[:2])
    keep: Any = mask
    if x.ndim == 3:
        bad, keep = bad[..., None], mask[..., None]
    return np.where(keep, x, bad)
