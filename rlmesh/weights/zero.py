"""`ZeroSource`: weights of a module that DeepSpeed trains with ZeRO.

In stages 1 and 2 every rank has all weights. In stage 3 a parameter is empty between passes and each rank has a part of
it: a bucket's parameters are made whole by all ranks together, handed on, and given up again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.lora import BASE, base_name
from rlmesh.weights.manifest import Kind, Manifest, TensorSpec
from rlmesh.weights.modules import Lora, tensors_to_send
from rlmesh.weights.pieces import dtype_name

if TYPE_CHECKING:
    from torch import Tensor, nn


def _is_partitioned(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


class ZeroSource:
    """What a DeepSpeed engine trains.

    Args:
        engine: what ``deepspeed.initialize`` gave. Names are those of the plain module. Elements are of the type that
            the engine computes in: the float32 copies of its optimizer are not synced.
        exclude: names that are not synced.
        lora: see `ModuleSource`.
        adapter: which adapter.

    Attributes:
        tensors: name → parameter or buffer, as it is on this rank.
    """

    lasting = False

    def __init__(
        self, engine: Any, *, exclude: Collection[str] = (), lora: Lora = "", adapter: str = "default"
    ) -> None:
        if not hasattr(engine, "zero_optimization_stage"):
            raise UsageError(
                f"ZeroSource takes what deepspeed.initialize() gives, not {type(engine).__name__}; for a module, use "
                "ModuleSource"
            )
        self._engine = engine
        module: nn.Module = engine.module
        self.tensors, self._makers, kinds, left = tensors_to_send(module, exclude, lora, adapter)
        self._manifest = _manifest(self.tensors, kinds, left)
        # What a computed tensor is computed from must be whole too.
        self._needs = {
            base_name(f"{name}.{BASE}weight"): list(layer.parameters())
            for name, layer in module.named_modules()
            if hasattr(layer, "get_delta_weight") and base_name(f"{name}.{BASE}weight") in self._makers
        }
        self._watched = list(module.parameters())
        self.device = str(next(iter(self.tensors.values())).device) if self.tensors else "cpu"

    def manifest(self) -> Manifest:
        return self._manifest

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        import torch

        parted = [p for name in names for p in self._needs.get(name, [self.tensors[name]]) if _is_partitioned(p)]
        with torch.no_grad(), _whole(parted):
            made = {}
            for name in names:
                make = self._makers.get(name)
                made[name] = make() if make is not None else self.tensors[name].detach()
            yield made

    def stamp(self) -> object:
        """DeepSpeed changes weights behind torch's counters, but counts its steps."""
        changes = tuple(getattr(p, "ds_tensor", p)._version for p in self._watched)
        return self._engine.global_steps, self._engine.skipped_steps, changes


@contextmanager
def _whole(parameters: Sequence[Any]) -> Iterator[None]:
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield


def _manifest(tensors: Mapping[str, Any], kinds: Mapping[str, Kind], excluded: tuple[str, ...]) -> Manifest:
    """Parameters that are tied are one object: a partitioned one has no memory to go by."""
    owners: dict[int, str] = {}
    specs = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise WeightSyncError(f"{name} has no memory yet (it is on the meta device): load the weights first")
        owner = owners.setdefault(id(tensor), name)
        tie = owner if owner != name else None
        shape = tuple(tensor.ds_shape) if _is_partitioned(tensor) else tuple(tensor.shape)
        specs.append(TensorSpec(name, shape, dtype_name(tensor), kinds.get(name, "parameter"), tie))
    return Manifest(tuple(specs), excluded)
