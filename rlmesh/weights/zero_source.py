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
from rlmesh.weights.module_source import Lora, tensors_to_send
from rlmesh.weights.transfer.module_snapshot import ModuleSnapshot
from rlmesh.weights.transfer.tensor_bytes import dtype_name

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
        self._asked = tuple(exclude), lora, adapter
        self._seen: ModuleSnapshot | None = None
        self._manifest = Manifest(())
        self._looks = 0
        self._look()

    def _look(self) -> None:
        """Take what the engine's module has now, if it is not what it had."""
        if self._seen is not None and self._seen.is_current():
            return
        module: nn.Module = self._engine.module
        self.tensors, self._makers, kinds, left = tensors_to_send(module, *self._asked)
        manifest = _manifest(self.tensors, kinds, left)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        # What a computed tensor is computed from must be whole too.
        self._needs = {
            base_name(f"{name}.{BASE}weight"): list(layer.parameters())
            for name, layer in module.named_modules()
            if hasattr(layer, "get_delta_weight") and base_name(f"{name}.{BASE}weight") in self._makers
        }
        self._watched = list(module.parameters())
        self.device = str(next(iter(self.tensors.values())).device) if self.tensors else "cpu"
        self._seen = ModuleSnapshot(module, self.tensors, places=False)
        self._looks += 1

    def manifest(self) -> Manifest:
        self._look()
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
        self._look()
        changes = self._looks, tuple(getattr(p, "ds_tensor", p)._version for p in self._watched)
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
