"""`ZeroSource`: weights of a module that DeepSpeed trains with ZeRO.

In stages 1 and 2 every rank has all weights. In stage 3 each rank has a part of every parameter, which is empty between
passes: all ranks gather a bucket's parameters together, send them, and free them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlmesh.errors import UsageError
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.module_tensors import BASE_LAYER, Lora, base_name, manifest_of, module_tensors
from rlmesh.weights.transfer.module_snapshot import ModuleSnapshot

if TYPE_CHECKING:
    from torch import Tensor, nn


class ZeroSource:
    """The weights of a DeepSpeed engine.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned. Names are those of the plain module. Elements have
            the type that the engine computes in: the optimizer's float32 copies are not synced.
        exclude: names that are not synced.
        lora: see `ModuleSource`.
        adapter: name of the adapter.

    Attributes:
        tensors: name → parameter or buffer, as it is on this rank.

    Raises:
        UsageError: ``engine`` is no DeepSpeed engine, or see `ModuleSource`.
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
        self._options = tuple(exclude), lora, adapter
        self._snapshot: ModuleSnapshot | None = None
        self._manifest = Manifest(())
        self._refreshes = 0
        self._refresh()

    def _refresh(self) -> None:
        """Take the current tensors of the engine's module, if they have changed."""
        if self._snapshot is not None and self._snapshot.is_current():
            return
        module: nn.Module = self._engine.module
        self.tensors, self._makers, kinds, excluded = module_tensors(module, *self._options, strict=True)
        manifest = manifest_of(self.tensors, kinds, excluded)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        # The inputs of a computed tensor must be gathered too.
        self._inputs = {
            base_name(f"{name}.{BASE_LAYER}weight"): list(layer.parameters())
            for name, layer in module.named_modules()
            if hasattr(layer, "get_delta_weight") and base_name(f"{name}.{BASE_LAYER}weight") in self._makers
        }
        self._watched = list(module.parameters())
        self.device = str(next(iter(self.tensors.values())).device) if self.tensors else "cpu"
        self._snapshot = ModuleSnapshot(module, self.tensors, places=False)
        self._refreshes += 1

    def manifest(self) -> Manifest:
        self._refresh()
        return self._manifest

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        import torch

        inputs = [p for name in names for p in self._inputs.get(name, [self.tensors[name]])]
        with torch.no_grad(), _gathered([p for p in inputs if hasattr(p, "ds_id")]):
            made = {}
            for name in names:
                make = self._makers.get(name)
                made[name] = make() if make is not None else self.tensors[name].detach()
            yield made

    def stamp(self) -> object:
        """DeepSpeed's counts of steps, since it changes weights without torch's counters; and these counters."""
        self._refresh()
        changes = self._refreshes, tuple(getattr(p, "ds_tensor", p)._version for p in self._watched)
        return self._engine.global_steps, self._engine.skipped_steps, changes


@contextmanager
def _gathered(parameters: Sequence[Any]) -> Iterator[None]:
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield
