"""`through`: stacks of linear layers as one node of autograd, whose operations and results are those of the layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from rlmesh.envs.modules.activations import Tanh, numpy_can, tanh
from rlmesh.envs.modules.encoders import Features

__all__ = ["plain_layers", "through"]

_KINDS: dict[type[nn.Module], str] = {Tanh: "tanh", nn.Tanh: "tanh", nn.ReLU: "relu"}
Steps = tuple[str | None, ...]
"""The activation after each linear layer, or None."""


def through(x: torch.Tensor, *networks: nn.Module) -> torch.Tensor:
    """The result of networks that follow each other.

    Stacks of linear layers with tanh or ReLU, on the CPU in float32, are computed without a node of autograd per layer
    and with activations in place: small networks spend a good part of a pass on these. All else is called as it is:
    layers with hooks, subclasses of layers, transformed functions. Gradients may be differentiated again.
    """
    layers = plain_layers(networks)
    if layers is not None and layers and type(layers[0]) is Features:
        x, layers = layers[0](x), layers[1:]
        networks = tuple(layers)
    if torch.compiler.is_compiling() or layers is None or (found := _steps(x, layers)) is None:
        for network in networks:
            x = network(x)
        return x
    steps, parameters = found
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
        y: torch.Tensor = _Dense.apply(x, steps, *parameters)  # type: ignore[no-untyped-call]
        return y
    return _outputs(x.detach(), steps, parameters)[-1]


def plain_layers(networks: Iterable[nn.Module]) -> list[nn.Module] | None:
    """The layers of networks that are one another's sequence; None if anybody wants to see what goes through them."""
    layers: list[nn.Module] = []
    for network in networks:
        if network._forward_hooks or network._forward_pre_hooks or network._backward_hooks:
            return None
        if network._backward_pre_hooks or "forward" in vars(network):
            return None
        if type(network) is nn.Sequential:
            inner = plain_layers(network._modules.values())
            if inner is None:
                return None
            layers += inner
        else:
            layers.append(network)
    return layers


def _steps(x: torch.Tensor, layers: list[nn.Module]) -> tuple[Steps, list[torch.Tensor]] | None:
    """The activations, and weight and bias of each linear layer; None if `_outputs` is not for this."""
    if len(layers) < 2 or x.dim() != 2 or not len(x) or not numpy_can(x) or torch.is_autocast_enabled("cpu"):
        return None
    if nn.modules.module._has_any_global_hook():
        return None
    kinds: list[str | None] = []
    parameters: list[torch.Tensor] = []
    for layer in layers:
        if type(layer) is nn.Linear:
            own = layer._parameters
            if not all(type(p) is nn.Parameter and p.dtype is torch.float32 and p.is_cpu for p in own.values()):
                return None
            parameters += own.values()  # type: ignore[arg-type]
            kinds.append(None)
        elif (kind := _KINDS.get(type(layer))) is not None and kinds and kinds[-1] is None:
            kinds[-1] = kind
        else:
            return None
    return tuple(kinds), parameters


def _outputs(x: torch.Tensor, steps: Steps, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of each linear layer with its activation; called without gradients."""
    given, outputs = iter(parameters), []
    for kind, weight, bias in zip(steps, given, given, strict=True):
        x = torch.addmm(bias, x, weight.t())
        if kind == "tanh":
            array = x.numpy()
            with np.errstate(all="ignore"):
                np.tanh(array, out=array)
        elif kind == "relu":
            x.relu_()
        outputs.append(x)
    return outputs


class _Dense(torch.autograd.Function):
    """Arguments: the input, the activations, then weight and bias of each layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, steps: Steps, *parameters: torch.Tensor) -> torch.Tensor:
        outputs = _outputs(x.detach(), steps, [p.detach() for p in parameters])
        ctx.steps = steps
        ctx.save_for_backward(x, *outputs, *parameters)
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), steps = gradients, ctx.steps
        kept, parameters = ctx.saved_tensors[: len(steps) + 1], ctx.saved_tensors[len(steps) + 1 :]
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]]
        if torch.is_grad_enabled():
            found = _differentiable(gradient, steps, (kept[0], *parameters), needed)
            return (found[0], None, *found[1:])
        given: list[torch.Tensor | None] = [None] * len(parameters)
        own = False  # True if nobody else has the memory of the gradient
        for i in reversed(range(len(steps))):
            if steps[i] == "tanh":
                memory = gradient if own else torch.empty_like(kept[i + 1])
                gradient = torch.ops.aten.tanh_backward.grad_input(gradient, kept[i + 1], grad_input=memory)
            elif steps[i] == "relu":
                gradient = torch.ops.aten.threshold_backward(gradient, kept[i + 1], 0)
            if needed[1 + 2 * i]:
                given[2 * i] = gradient.t().mm(kept[i])
            if needed[2 + 2 * i]:
                given[2 * i + 1] = gradient.sum(0)
            if not any(needed[: 1 + 2 * i]):
                return (None, None, *given)
            gradient, own = gradient.mm(parameters[2 * i]), True
        return (gradient, None, *given)


def _differentiable(
    gradient: torch.Tensor, steps: Steps, inputs: tuple[torch.Tensor, ...], needed: list[bool]
) -> list[torch.Tensor | None]:
    """The gradients by the input and by the parameters, which have gradients themselves."""
    views = [each.view_as(each) for each in inputs]  # an input may depend on another one: only the views are asked for
    x, given = views[0], iter(views[1:])
    for kind, weight, bias in zip(steps, given, given, strict=True):
        x = nn.functional.linear(x, weight, bias)
        x = tanh(x) if kind == "tanh" else torch.relu(x) if kind == "relu" else x
    wanted = [view for view, need in zip(views, needed, strict=True) if need]
    found = iter(torch.autograd.grad(x, wanted, gradient, create_graph=True))
    return [next(found) if need else None for need in needed]
