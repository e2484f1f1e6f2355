"""`Seen`: what a module had when it was looked at, and a cheap way to find out that it has something else now.

Parameters are replaced by ``load_state_dict(assign=True)``, by ties, by resized embeddings and by adapters; ``to()`` and
``half()`` keep the parameter and replace its memory. Whoever holds tensors of a module for longer than a call must look
again before each use. A look compares identities, some hundred of them in a tenth of a millisecond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

KeyOf = Callable[["Tensor"], object]


def place_key(tensor: Tensor) -> object:
    """Where a tensor's elements are here, and how they lie there."""
    here: Any = getattr(tensor, "_local_tensor", tensor)
    return here.data_ptr(), here.shape, here.stride(), here.dtype


def form_key(tensor: Tensor) -> object:
    """Shape and type, for who changes the memory itself."""
    return getattr(tensor, "ds_shape", tensor.shape), tensor.dtype


class Seen:
    """What ``module`` has now.

    Args:
        module: with all its submodules.
        tensors: those of its tensors that are used, by name.
        key_of: what must stay the same of each.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor], key_of: KeyOf) -> None:
        self._key_of = key_of
        self._dicts = [
            (entries, tuple(entries), tuple(entries.values()))
            for owner in module.modules()
            for entries in (owner._modules, owner._parameters, owner._buffers)
        ]
        self._names = tuple(tensors)
        self._tensors = tuple(tensors.values())
        self._keys = list(map(key_of, self._tensors))

    def is_current(self) -> bool:
        """Does the module have the same tensors still, at the same places?"""
        for entries, names, values in self._dicts:
            if len(entries) != len(names) or not all(map(is_, entries.values(), values)) or tuple(entries) != names:
                return False
        return list(map(self._key_of, self._tensors)) == self._keys

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        """Are these the tensors that are used, at the same places? A module that replaces others of its tensors, such
        as a mask that it keeps, is another one to `is_current`."""
        same = tuple(tensors) == self._names and all(map(is_, tensors.values(), self._tensors))
        return same and list(map(self._key_of, self._tensors)) == self._keys


def has_memory(tensors: Mapping[str, Tensor]) -> bool:
    """False while the memory of some was given up: offloaded, or asleep."""
    here: list[Any] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors.values()]
    return all(local.is_meta or not local.numel() or local.untyped_storage().nbytes() for local in here)


def shard_again(module: nn.Module) -> None:
    """FSDP2 may leave whole parameters in a module after a forward pass. Its own, which are trained, are the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    for part in module.modules() if kind is not None else ():
        if isinstance(part, kind):
            part.reshard()
