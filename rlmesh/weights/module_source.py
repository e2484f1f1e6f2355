"""Weights of torch modules that are trained: `ModuleSource` (plain, DDP, FSDP2, tensor parallel, LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Literal

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.manifest import Kind, Manifest, TensorSpec
from rlmesh.weights.transfer.module_snapshot import ModuleSnapshot, has_memory, shard_again
from rlmesh.weights.transfer.tensor_bytes import dtype_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlmesh.weights.lora import Named


Lora = Literal["", "adapter", "merged"]


def whole_name(name: str) -> str:
    """A name without what wrappers put into it: DDP, torch.compile, activation checkpointing."""
    for part in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def named_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Kind], tuple[str, ...]]:
    """Parameters and buffers by name, tied ones under each of their names; what kind each is; and the buffers that are
    left out since no checkpoint would hold them either."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Kind] = {}
    excluded = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensors[whole_name(name)], kinds[whole_name(name)] = parameter, "parameter"
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for own, buffer in owner._buffers.items():
            name = whole_name(f"{prefix}.{own}" if prefix else own)
            if buffer is None:
                continue
            if own in owner._non_persistent_buffers_set:
                excluded.append(name)
            else:
                tensors[name], kinds[name] = buffer, "buffer"
    return tensors, kinds, tuple(excluded)


def tensors_to_send(module: nn.Module, exclude: Collection[str], lora: Lora, adapter: str) -> Named:
    """What a source gives: tensors by name, makers of those that are computed, what kind each is, and the names that it
    leaves out.

    Raises:
        UsageError: there is no such tensor to leave out, no such adapter, or no such way with adapters.
    """
    if lora not in ("", "adapter", "merged"):
        raise UsageError(f"lora={lora!r}: it is 'adapter', 'merged' or ''")
    makers: dict[str, Callable[[], Tensor]] = {}
    if lora:
        from rlmesh.weights.lora import lora_tensors

        tensors, makers, kinds, left = lora_tensors(module, lora, adapter)
    else:
        tensors, kinds, left = named_tensors(module)
    unknown = set(exclude) - set(tensors)
    if unknown:
        raise UsageError(f"exclude: the module has no {sorted(unknown)}")
    kept = {name: tensor for name, tensor in tensors.items() if name not in exclude}
    return kept, makers, kinds, (*exclude, *left)


def manifest_of(tensors: Mapping[str, Tensor], kinds: Mapping[str, Kind], excluded: tuple[str, ...]) -> Manifest:
    """Shapes are those of the whole tensors, also where only a shard is here."""
    owners: dict[object, str] = {}
    specs = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise WeightSyncError(f"{name} has no memory yet (it is on the meta device): load the weights first")
        owner = owners.setdefault(_memory_of(tensor, name), name)
        tie = owner if owner != name else None
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor), kinds.get(name, "parameter"), tie))
    return Manifest(tuple(specs), excluded)


def _memory_of(tensor: Tensor, name: str) -> object:
    """Equal for tensors that show the same elements in the same order."""
    local = _local(tensor)
    if not local.numel():
        return name
    return local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]] | None:
    """Which elements of each tensor are in this process, in C order: (first, how many). None if some are not in one
    run: sharded along another dimension than the first, or with strides."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parts = {}
    for name, tensor in tensors.items():
        if not _local(tensor).is_contiguous():
            return None
        first = 0
        if isinstance(tensor, DTensor):
            if not all(type(p) is Replicate or (type(p) is Shard and p.dim == 0) for p in tensor.placements):
                return None
            shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if tuple(shape) != tuple(_local(tensor).shape):
                return None
            first = start[0] * prod(tensor.shape[1:]) if start else 0
        parts[name] = first, _local(tensor).numel()
    return parts


class ModuleSource:
    """A module that is trained here. Each push gives what the module has then, also where its parameters were replaced.

    Plain modules and DDP give their own tensors; sharded ones (FSDP2, tensor parallel: parameters are DTensors) are
    gathered, bucket by bucket, by all ranks together.

    Args:
        module: the module, wrapped or not. Names are those of the plain module.
        exclude: names that are not synced.
        lora: of a peft model: "adapter" gives the adapter's tensors only, "merged" the base model's names with the
            adapter added in; "" everything as it is.
        adapter: which adapter.
    """

    def __init__(
        self, module: nn.Module, *, exclude: Collection[str] = (), lora: Lora = "", adapter: str = "default"
    ) -> None:
        self._module, self._asked = module, (tuple(exclude), lora, adapter)
        self._seen: ModuleSnapshot | None = None
        self._tensors: dict[str, Tensor] = {}
        self._manifest = Manifest(())
        self._looks = 0
        self._look()

    def _look(self, *, forms: bool = True) -> None:
        """Take what the module has now, if it is not what it had."""
        if self._seen is not None and self._seen.is_current(forms=forms):
            return
        shard_again(self._module)
        # Memory that was given up comes back as it was; without it nobody can tell which tensors are tied.
        if self._seen is not None and (self._seen.is_current() or not has_memory(self._tensors)):
            return
        exclude, lora, adapter = self._asked
        tensors, makers, kinds, left = tensors_to_send(self._module, exclude, lora, adapter)
        seen, self._seen = self._seen, ModuleSnapshot(self._module, tensors, places=True)
        if seen is not None and seen.has(tensors) and not makers:
            return
        manifest = manifest_of(tensors, kinds, left)
        self._tensors, self._makers = tensors, makers
        self._manifest = self._manifest if manifest == self._manifest else manifest
        watched = {id(tensor): tensor for tensor in (*tensors.values(), *self._module.parameters())}
        self._watched = list(watched.values())
        self.lasting = not makers and all(_local(t) is t for t in tensors.values())
        self._parts = None if self.lasting or makers else parts_of(tensors)
        self.device = str(_local(next(iter(tensors.values()))).device) if tensors else "cpu"
        self._looks += 1

    def manifest(self) -> Manifest:
        self._look()
        return self._manifest

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        import torch
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            if self.lasting:
                every = len(names) == len(self._tensors)  # as between GPUs in every push: nothing is made for it
                yield self._tensors if every else {name: self._tensors[name] for name in names}
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
        yield {name: _local(self._tensors[name]) for name in names}

    def stamp(self) -> object:
        """torch counts the changes of every tensor in place."""
        self._look(forms=False)
        if self.lasting:
            return self._looks, [tensor._version for tensor in self._watched]
        return self._looks, [_local(tensor)._version for tensor in self._watched]
