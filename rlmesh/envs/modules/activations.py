"""`tanh` for networks on CPUs: NumPy's, which takes a seventh of the time of torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad

__all__ = ["Tanh", "numpy_can", "tanh"]

SMALLEST, SMALLEST_WITH_GRADIENT = 2048, 8192
"""Elements from which NumPy's is faster: a call costs some microseconds more, and its gradient more again."""
MOST_THREADS = 4
"""Threads up to which one of NumPy's is faster than all of torch's."""


class Tanh(nn.Tanh):
    """`torch.nn.Tanh` by `tanh`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(input) if torch.jit.is_scripting() else tanh(input)  # type: ignore[attr-defined]


def tanh(x: torch.Tensor) -> torch.Tensor:
    """The hyperbolic tangent: NumPy's for float32 tensors on the CPU, with an error of 2 ulp at most; else torch's.

    It can be differentiated as often as torch's. NumPy's has no branch by the place of an element, so that the values
    of a row do not depend on the other rows, as long as the tensors are large enough.
    """
    if torch.compiler.is_compiling() or not numpy_can(x):
        return torch.tanh(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return torch.tanh(x) if x.numel() < SMALLEST_WITH_GRADIENT else _with_gradient(x)
    return torch.tanh(x) if x.numel() < SMALLEST else _values(x)


def numpy_can(x: torch.Tensor) -> bool:
    """True for plain float32 tensors of the CPU, if nothing but autograd looks at what is computed."""
    return (
        x.dtype is torch.float32
        and type(x) is torch.Tensor
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_neg()
        and torch.get_num_threads() <= MOST_THREADS
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def _values(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)  # aligned as torch's kernels like it
    with np.errstate(all="ignore"):
        np.tanh(x.detach().numpy(), out=y.numpy())
    return y


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = _values(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        result: torch.Tensor = torch.ops.aten.tanh_backward(gradients[0], y)  # has a gradient of its own
        return result


def _with_gradient(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _WithGradient.apply(x)  # type: ignore[no-untyped-call]
    return y
