"""`TensorCount`: counts the bytes of live tensors and their peak, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TensorCount"]


class TensorCount(TorchDispatchMode):
    """Counts the memory of tensors that operations make while it is active, each from its creation to its release.

    Tensors without data (meta and fake tensors) count like real ones, so the peak of a step can be found from shapes.
    Memory inside of kernels, such as a matrix product's workspace, is not counted.

    Attributes:
        live: bytes of the counted tensors that are alive.
        peak: the largest value of ``live`` since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> None:
        """Set ``peak`` to what is alive now."""
        self.peak = self.live

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that exists already."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result
