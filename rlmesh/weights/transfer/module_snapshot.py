"""`ModuleSnapshot`: the tensors of a module at one moment, and a fast test whether the module still has them.

Parameters are replaced by ``load_state_dict(assign=True)``, by ties, by resized embeddings and by adapters; ``to()``
and ``half()`` keep the parameter and replace its memory. Code that stores a module's tensors for longer than a call
must test them before each use. The test compares identities, some hundreds in a tenth of a millisecond.
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
    """The current tensors of a module.

    Args:
        module: with all its submodules.
        tensors: the tensors that are used, by name.
        places: True: their addresses must stay the same too; False: memory may be replaced if shapes and types stay.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor], *, places: bool) -> None:
        dicts: list[dict[str, Any]] = [
            entries for owner in module.modules() for entries in (owner._modules, owner._parameters, owner._buffers)
        ]
        self._dicts = [entries for entries in dicts if entries]
        # Three of four are empty, with peft even more: to see that they still are takes much less time.
        self._empty = [entries for entries in dicts if not entries]
        self._owned = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._owned_names = list(chain.from_iterable(self._dicts))
        self._names, self._tensors = tuple(tensors), tuple(tensors.values())
        self._sharded = any(hasattr(tensor, "_local_tensor") for tensor in self._tensors)
        self._addresses = self._addresses_now() if places else None
        self._forms = self._forms_now()

    def is_current(self, *, forms: bool = True) -> bool:
        """True if the module still has the same tensors, at the same places; without ``forms``, shapes and types are
        not compared, which takes the most time."""
        if any(self._empty):
            return False
        owned = list(chain.from_iterable(map(dict.values, self._dicts)))
        if len(owned) != len(self._owned) or not all(map(is_, owned, self._owned)):
            return False
        return list(chain.from_iterable(self._dicts)) == self._owned_names and self._are_unchanged(forms)

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        """True if these are the tensors that are used, at the same places.

        It holds, unlike `is_current`, if the module replaces other tensors, such as a mask.
        """
        same = tuple(tensors) == self._names and all(map(is_, tensors.values(), self._tensors))
        return same and self._are_unchanged(forms=True)

    def _are_unchanged(self, forms: bool) -> bool:
        if self._addresses is not None and self._addresses_now() != self._addresses:
            return False
        return not forms or self._forms_now() == self._forms

    def _local(self) -> Sequence[Any]:
        return (
            [getattr(tensor, "_local_tensor", tensor) for tensor in self._tensors] if self._sharded else self._tensors
        )

    def _addresses_now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._local()]

    def _forms_now(self) -> list[object]:
        if self._addresses is not None:
            return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in self._local()]
        return [(getattr(tensor, "ds_shape", tensor.shape), tensor.dtype) for tensor in self._tensors]


def has_memory(tensors: Mapping[str, Tensor]) -> bool:
    """False while the memory of some tensor is freed: offloaded, or asleep."""
    local: list[Any] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors.values()]
    return all(one.is_meta or not one.numel() or one.untyped_storage().nbytes() for one in local)


def shard_again(module: nn.Module) -> None:
    """Let FSDP2 shard a module's parameters again: after a forward pass it may leave them whole, but the optimizer
    changes the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", None)
    for part in module.modules() if kind is not None else ():
        if isinstance(part, kind):
            part.reshard()
