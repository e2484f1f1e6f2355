"""Tensors on a GPU without a GPU: they have a device, a shape and a type, but no data.

An operation on tensors of several devices raises, as on a GPU. So does a value that is read from the device, unless the
test allows for it; and a tensor whose shape depends on values, for which a GPU must be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from rlmesh.rl import prefix
from rlmesh.rl.engines.training import torch_engine
from rlmesh.rl.head import log_probs

__all__ = ["Transfers", "fake_gpu"]


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Transfers(TorchDispatchMode):
    """Counts copies from the GPU to the host, and refuses matrix products of several types, as a GPU does.

    Attributes:
        names: the operation of each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {one.dtype for one in args if isinstance(one, Tensor)} if func in PRODUCTS else set()
        if len(kinds) > 1:
            raise RuntimeError(f"expected all tensors of {func} to have the same dtype, got {kinds}")
        found = func(*args, **(kwargs or {}))
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        if isinstance(source, Tensor) and isinstance(found, Tensor) and source.is_cuda and not found.is_cuda:
            self.names.append(str(func))
        return found


@contextmanager
def fake_gpu(patch: Any) -> Iterator[Transfers]:
    """A block in which tensors have no data, and those of the device "cuda" are as on a GPU.

    Args:
        patch: pytest's ``MonkeyPatch``.
    """
    transfers = Transfers()

    def numpy(tensor: Tensor, **_: Any) -> np.ndarray:
        if tensor.is_cuda:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()

    def tolist(tensor: Tensor) -> Any:
        if tensor.is_cuda:
            transfers.names.append("tolist")
        return np.zeros(tensor.shape).tolist()

    real = Tensor.numpy
    patch.setattr(Tensor, "numpy", lambda one, **options: (numpy if is_fake(one) else real)(one, **options))
    patch.setattr(FakeTensor, "tolist", tolist)
    # Layouts are made on the CPU, from numbers.
    for name in ("_batch", "_starts", "_keys"):
        patch.setattr(prefix, name, with_data(getattr(prefix, name)))
    # There is no memory that anybody could own, and kernels of Triton need data.
    patch.setattr(torch_engine, "own_memory", lambda tensors: None)
    patch.setattr(log_probs, "_kernels", lambda: None)
    # torch exchanges the contents of two tensors, which those without data do not support.
    patch.setattr(nn.Module, "_apply", moved)
    # Autocast asks whether there is a GPU.
    patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    # Without it, the backward pass has a thread for each device.
    threads = torch.autograd.set_multithreading_enabled(False)
    with threads, FakeTensorMode(allow_non_fake_inputs=True), transfers:
        yield transfers


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor without data."""
    return isinstance(tensor, FakeTensor)


def with_data(function: Any) -> Any:
    """A function whose tensors have data."""

    def made(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **options)

    return made


def moved(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """``Module._apply``, which ``Module.to`` calls: new tensors in the places of those that change."""
    for child in module.children() if recurse else ():
        moved(child, function)
    for name, weight in module._parameters.items():
        if weight is None:
            continue
        new = function(weight.detach())
        if (new.device, new.dtype) != (weight.device, weight.dtype):
            module._parameters[name] = nn.Parameter(new, requires_grad=weight.requires_grad)
    for name, value in module._buffers.items():
        module._buffers[name] = None if value is None else function(value)
    return module
