"""Nested states as tensors, so that torch reads them back without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["arrays_of_tree", "tensors_of_tree"]


def tensors_of_tree(value: Any) -> Any:
    """The value with arrays as tensors, and NumPy's numbers as Python's."""
    import torch

    if isinstance(value, np.ndarray):
        return {"__array__": torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: tensors_of_tree(each) for key, each in value.items()}
    return type(value)(map(tensors_of_tree, value)) if isinstance(value, list | tuple) else value


def arrays_of_tree(value: Any) -> Any:
    """The value that `tensors_of_tree` was given."""
    if isinstance(value, dict):
        if value.keys() == {"__array__"}:
            return value["__array__"].numpy()
        return {key: arrays_of_tree(each) for key, each in value.items()}
    return type(value)(map(arrays_of_tree, value)) if isinstance(value, list | tuple) else value
