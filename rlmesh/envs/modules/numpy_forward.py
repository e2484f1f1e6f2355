"""Forward passes of small networks in NumPy: a few microseconds where torch's dispatch alone takes twenty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from rlmesh.envs.modules.encoders import Features, LogStdColumns

__all__ = ["NumpyForward"]

_PLAIN: dict[type[nn.Module], Callable[[np.ndarray], np.ndarray]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
}
LARGEST = 512
"""The width of a layer from which torch's own kernels win."""


class NumpyForward:
    """The forward pass of linear layers, tanh and ReLU; the weights are those of the moment of its making.

    Make a new one after each change of the weights: the copy takes microseconds.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._steps: list[tuple[np.ndarray, np.ndarray] | Callable[[np.ndarray], np.ndarray]] = []
        for layer in layers:
            if isinstance(layer, nn.Linear):
                weight = np.ascontiguousarray(layer.weight.detach().numpy().T)
                self._steps.append((weight, layer.bias.detach().numpy().copy()))
            elif isinstance(layer, LogStdColumns):
                self._steps.append(_Appended(layer.log_std.detach().numpy().copy()))
            else:
                self._steps.append(_PLAIN[type(layer)])

    @classmethod
    def of(cls, net: nn.Module | None) -> NumpyForward | None:
        """The pass of a network; None if the network has other layers, is wide, or is not on the CPU in float32."""
        layers = _flat(net) if net is not None else []
        if layers and isinstance(layers[0], Features) and layers[0].is_plain:
            layers = layers[1:]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if not linear or len(linear) + sum(type(layer) in (*_PLAIN, LogStdColumns) for layer in layers) != len(layers):
            return None
        wide = max(max(layer.in_features, layer.out_features) for layer in linear) > LARGEST
        odd = any(p.dtype != torch.float32 or p.device.type != "cpu" for layer in linear for p in layer.parameters())
        if wide or odd or any(layer.bias is None for layer in linear):
            return None
        return cls(layers)

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


class _Appended:
    """Appends the same values to each row."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.broadcast_to(self.values, (len(x), len(self.values)))], -1)


def _flat(net: nn.Module) -> list[nn.Module]:
    if isinstance(net, nn.Sequential):
        return [layer for child in net for layer in _flat(child)]
    return [] if isinstance(net, nn.Identity) else [net]
