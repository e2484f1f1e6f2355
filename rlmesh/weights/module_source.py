"""`ModuleSource`: weights of a torch module that is trained (plain, DDP, FSDP2, tensor parallel, LoRA)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

from rlmesh.weights.manifest import Manifest
from rlmesh.weights.module_tensors import Lora, local_tensor, manifest_of, module_tensors
from rlmesh.weights.transfer.module_snapshot import ModuleSnapshot, has_memory, shard_again

if TYPE_CHECKING:
    from torch import Tensor, nn


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]] | None:
    """Tensor → (first, count) of the elements in this process, in C order.

    None if the elements of some tensor are no contiguous range: sharded along another dimension than the first, or
    with strides.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parts = {}
    for name, tensor in tensors.items():
        if not local_tensor(tensor).is_contiguous():
            return None
        first = 0
        if isinstance(tensor, DTensor):
            if not all(type(p) is Replicate or (type(p) is Shard and p.dim == 0) for p in tensor.placements):
                return None
            shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if tuple(shape) != tuple(local_tensor(tensor).shape):
                return None
            first = start[0] * prod(tensor.shape[1:]) if start else 0
        parts[name] = first, local_tensor(tensor).numel()
    return parts


class ModuleSource:
    """The weights of a trained module. Each push gives the module's current tensors, also replaced parameters.

    Plain modules and DDP give their own tensors. Sharded parameters (DTensors: FSDP2, tensor parallel) are gathered,
    bucket by bucket, by all ranks together.

    Args:
        module: the module, wrapped or not. Names are those of the plain module.
        exclude: names that are not synced.
        lora: of a peft model: "adapter" gives the adapter's tensors only, "merged" the base model's tensors with the
            adapter added; "" all tensors as they are.
        adapter: name of the adapter.
    """

    def __init__(
        self, module: nn.Module, *, exclude: Collection[str] = (), lora: Lora = "", adapter: str = "default"
    ) -> None:
        self._module, self._options = module, (tuple(exclude), lora, adapter)
        self._snapshot: ModuleSnapshot | None = None
        self._tensors: dict[str, Tensor] = {}
        self._manifest = Manifest(())
        self._refreshes = 0
        self._refresh()

    def _refresh(self, *, forms: bool = True) -> None:
        """Take the module's current tensors, if they have changed."""
        if self._snapshot is not None and self._snapshot.is_current(forms=forms):
            return
        shard_again(self._module)
        # Offloaded memory comes back unchanged; while it is gone, ties between tensors cannot be detected.
        if self._snapshot is not None and (self._snapshot.is_current() or not has_memory(self._tensors)):
            return
        tensors, makers, kinds, excluded = module_tensors(self._module, *self._options, strict=True)
        before, self._snapshot = self._snapshot, ModuleSnapshot(self._module, tensors, places=True)
        if before is not None and before.has(tensors) and not makers:
            return
        manifest = manifest_of(tensors, kinds, excluded)
        self._tensors, self._makers = tensors, makers
        self._manifest = self._manifest if manifest == self._manifest else manifest
        watched = {id(tensor): tensor for tensor in (*tensors.values(), *self._module.parameters())}
        self._watched = list(watched.values())
        self.lasting = not makers and all(local_tensor(t) is t for t in tensors.values())
        self._parts = None if self.lasting or makers else parts_of(tensors)
        self.device = str(local_tensor(next(iter(tensors.values()))).device) if tensors else "cpu"
        self._refreshes += 1

    def manifest(self) -> Manifest:
        self._refresh()
        return self._manifest

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        import torch
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            if self.lasting:
                everything = len(names) == len(self._tensors)  # usual between GPUs: saves making another dict
                yield self._tensors if everything else {name: self._tensors[name] for name in names}
                return
            whole = {}
            for name in names:
                make = self._makers.get(name)
                tensor = make() if make is not None else self._tensors[name].detach()
                whole[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield whole

    def parts(self) -> Mapping[str, tuple[int, int]] | None:
        return self._parts

    @contextmanager
    def shards(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        yield {name: local_tensor(self._tensors[name]) for name in names}

    def stamp(self) -> object:
        """Torch's counters of in-place changes, of every tensor."""
        self._refresh(forms=False)
        if self.lasting:
            return self._refreshes, [tensor._version for tensor in self._watched]
        return self._refreshes, [local_tensor(tensor)._version for tensor in self._watched]
