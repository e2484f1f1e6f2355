"""`NumpyLayers`: small networks without torch, described by the names of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

__all__ = ["ACTIVATIONS_IN_NUMPY", "Layer", "NumpyLayers", "appended"]

Layer = tuple[str, ...]
"""``("linear", weight, bias)``, ``("columns", values)``, or the name of an activation."""
Step = tuple[np.ndarray, np.ndarray] | Callable[[np.ndarray], np.ndarray]

ACTIVATIONS_IN_NUMPY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
}


class NumpyLayers:
    """The forward pass of linear layers, tanh and ReLU.

    Args:
        steps: a weight ``[inputs, outputs]`` with its bias, or a function of rows, for each layer.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)

    @classmethod
    def described(cls, layers: Sequence[Layer], weights: Mapping[str, np.ndarray]) -> NumpyLayers:
        """The pass of layers whose weights are found by name; a weight is ``[outputs, inputs]``, as torch has it."""
        steps: list[Step] = []
        for kind, *names in layers:
            if kind == "linear":
                steps.append((np.array(weights[names[0]].T, order="C"), np.array(weights[names[1]])))
            elif kind == "columns":
                steps.append(appended(np.array(weights[names[0]])))
            else:
                steps.append(ACTIVATIONS_IN_NUMPY[kind])
        return cls(steps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Outputs ``[rows, …]`` of inputs ``[rows, …]``, float32."""
        if x.dtype != np.float32:
            x = x.astype(np.float32)
        for step in self._steps:
            if isinstance(step, tuple):
                x = x @ step[0]
                x += step[1]
            else:
                x = step(x)
        return x


def appended(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A layer that appends the same values to each row."""
    return lambda x: np.concatenate([x, np.broadcast_to(values, (len(x), len(values)))], -1)
