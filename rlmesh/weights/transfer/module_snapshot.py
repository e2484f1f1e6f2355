"""`ModuleSnapshot`: the tensors of a module at one moment, and a cheap test whether the module still has them.

Parameters are replaced by ``load_state_dict(assign=True)``, by ties, by resized embeddings and by adapters; ``to()``
and ``half()`` keep the parameter and replace its memory. Whoever holds tensors of a module for longer than a call must
look again before each use. A look compares identities, some hundred of them in a tenth of a millisecond.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModuleSnapshot:
    """What ``module`` has now.

    Args:
        module: with all its submodules.
        tensors: those of its tensors that are used, by name.
        places: they must also stay where they are in memory. Who changes the memory itself looks at shapes and types.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor], *, places: bool) -> None:
        self._dicts: list[dict[str, Any]] = [
            entries for owner in module.modules() for entries in (owner._modules, owner._parameters, owner._buffers)
        ]
        self._owned = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._owned_names = list(chain.from_iterable(self._dicts))
        self._names, self._tensors = tuple(tensors), tuple(tensors.values())
        self._sharded = any(hasattr(tensor, "_local_tensor") for tensor in self._tensors)
        self._addresses = self._addresses_now() if places else None
        self._forms = self._forms_now()

    def is_current(self, *, forms: bool = True) -> bool:
        """Does the module have the same tensors still, at the same places? Without ``forms`` shapes and types are not
        looked at, which takes the most time."""
        owned = list(chain.from_iterable(map(dict.values, self._dicts)))
        if len(owned) != len(self._owned) or not all(map(is_, owned, self._owned)):
            return False
        return list(chain.from_iterable(self._dicts)) == self._owned_names and self._are_as_they_were(forms)

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        """Are these the tensors that are used, at the same places? A module that replaces others of its tensors, such
        as a mask that it keeps, is another one to `is_current`."""
        same = tuple(tensors) == self._names and all(map(is_, tensors.values(), self._tensors))
        return same and self._are_as_they_were(forms=True)

    def _are_as_they_were(self, forms: bool) -> bool:
        if self._addresses is not None and self._addresses_now() != self._addresses:
            return False
        return not forms or self._forms_now() == self._forms

    def _here(self) -> Sequence[Any]:
        return (
            [getattr(tensor, "_local_tensor", tensor) for tensor in self._tensors] if self._sharded else self._tensors
        )

    def _addresses_now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._here()]

    def _forms_now(self) -> list[object]:
        if self._addresses is not None:
            return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in self._here()]
        return [(getattr(tensor, "ds_shape", tensor.shape), tensor.dtype) for tensor in self._tensors]


def has_memory(tensors: Mapping[str, Tensor]) -> bool:
    """False while the memory of some was given up: offloaded, or asleep."""
    here: list[Any] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors.values()]
    return all(local.is_meta or not local.numel() or local.untyped_storage().nbytes() for local in here)


def shard_again(module: nn.Module) -> None:
    """FSDP2 may leave whole parameters in a module after a forward pass. Its own, which are trained, are the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", None)
    for part in module.modules() if kind is not None else ():
        if isinstance(part, kind):
            part.reshard()
