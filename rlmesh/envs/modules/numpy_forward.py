"""Forward passes of small networks in NumPy: a few microseconds where torch's dispatch alone takes twenty."""

from __future__ import annotations

import torch
from torch import nn

from rlmesh.envs.modules.activations import Tanh
from rlmesh.envs.modules.dense import plain_layers
from rlmesh.envs.modules.encoders import Features, LogStdColumns
from rlmesh.envs.modules.numpy_layers import Layer, NumpyLayers

__all__ = ["NumpyForward", "layers_by_name"]

_PLAIN: dict[type[nn.Module], str] = {nn.Tanh: "tanh", Tanh: "tanh", nn.ReLU: "relu"}
LARGEST = 512
"""The width of a layer from which torch's own kernels win."""


class NumpyForward(NumpyLayers):
    """The forward pass of linear layers, tanh and ReLU; the weights are those of the moment of its making.

    Make a new one after each change of the weights: the copy takes microseconds.
    """

    @classmethod
    def of(cls, net: nn.Module | None) -> NumpyLayers | None:
        """The pass of a network; None if the network has other layers, is wide, or is not on the CPU in float32."""
        if net is None or (layers := layers_by_name(net)) is None:
            return None
        return cls.described(layers, {name: each.detach().numpy() for name, each in net.named_parameters()})


def layers_by_name(net: nn.Module, owner: nn.Module | None = None) -> list[Layer] | None:
    """The layers of a network; None if `NumpyForward` has no such layers.

    Args:
        owner: the module whose names of parameters are taken; None: the network.
    """
    flat = plain_layers([net])
    if flat is None or nn.modules.module._has_any_global_hook():
        return None
    layers = [layer for layer in flat if type(layer) is not nn.Identity]
    if layers and type(layers[0]) is Features and layers[0].is_plain:
        layers = layers[1:]
    linear = [layer for layer in layers if type(layer) is nn.Linear]  # a subclass may compute something else
    if not linear or len(linear) + sum(type(layer) in (*_PLAIN, LogStdColumns) for layer in layers) != len(layers):
        return None
    wide = max(max(layer.in_features, layer.out_features) for layer in linear) > LARGEST
    odd = any(p.dtype != torch.float32 or p.device.type != "cpu" for layer in linear for p in layer.parameters())
    if wide or odd or any(layer.bias is None for layer in linear):
        return None
    names = {id(parameter): name for name, parameter in (owner or net).named_parameters()}
    return [
        ("linear", names[id(layer.weight)], names[id(layer.bias)])
        if type(layer) is nn.Linear
        else ("columns", names[id(layer.log_std)])
        if isinstance(layer, LogStdColumns)
        else (_PLAIN[type(layer)],)
        for layer in layers
    ]
