"""Reuse of large arrays: the first writes to new memory cost more than the copies themselves."""

from __future__ import annotations

import sys

import numpy as np

__all__ = ["ArrayPool"]

LEAST_BYTES = 1 << 20
"""Smaller arrays are allocated anew: their memory is reused by the allocator."""
KEPT = 2


def _references(arrays: list[np.ndarray]) -> list[int]:
    """Numbers of references to each array, those of this function included."""
    return [sys.getrefcount(array) for array in arrays]


OF_ITS_LIST = _references([np.zeros(1)])[0]
"""The number for an array that nobody but a list refers to. It differs between versions of Python."""


class ArrayPool:
    """Arrays that are given out again once nobody refers to them, neither directly nor by a view or a tensor.

    A batch that its reader keeps is never overwritten: its views refer to the array. The contents of an array that is
    given out are those of its last use.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array whose elements the caller sets."""
        if np.prod(shape, dtype=np.int64) * dtype.itemsize < LEAST_BYTES:
            return np.zeros(shape, dtype)
        self._arrays = [array for array in self._arrays if array.shape == shape and array.dtype == dtype]
        for i, references in enumerate(_references(self._arrays)):
            if references == OF_ITS_LIST:
                return self._arrays[i]
        self._arrays = [*self._arrays[-KEPT + 1 :], np.zeros(shape, dtype)]
        return self._arrays[-1]
