"""Weights of torch modules: `ModuleSource` (plain, DDP, FSDP2, tensor parallel, LoRA) and `ModuleSink`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.manifest import Kind, Manifest, TensorSpec
from rlmesh.weights.pieces import dtype_name
from rlmesh.weights.plan import Mode
from rlmesh.weights.protocols import Framework

if TYPE_CHECKING:
    from torch import Tensor, nn

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


class ModuleSource:
    """A module that is trained here.

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
        if lora not in ("", "adapter", "merged"):
            raise UsageError(f"lora={lora!r}: it is 'adapter', 'merged' or ''")
        self._makers: dict[str, Callable[[], Tensor]] = {}
        if lora:
            from rlmesh.weights.lora import lora_tensors

            tensors, self._makers, kinds, left = lora_tensors(module, lora, adapter)
        else:
            tensors, kinds, left = named_tensors(module)
        unknown = set(exclude) - set(tensors)
        if unknown:
            raise UsageError(f"exclude: the module has no {sorted(unknown)}")
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in exclude}
        self._watched = list(module.parameters())
        self._manifest = manifest_of(self._tensors, kinds, (*exclude, *left))
        self.lasting = not self._makers and all(_local(t) is t for t in self._tensors.values())
        self.device = str(_local(next(iter(self._tensors.values()))).device) if self._tensors else "cpu"

    def manifest(self) -> Manifest:
        return self._manifest

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        import torch
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            whole = {}
            for name in names:
                make = self._makers.get(name)
                tensor = make() if make is not None else self._tensors[name].detach()
                whole[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield whole

    def stamp(self) -> object:
        """torch counts the changes of every tensor in place."""
        return tuple(_local(parameter)._version for parameter in self._watched)


class ModuleSink:
    """A module that is used here.

    A `double_buffer` sink swaps the memory of its parameters and buffers at the flip (``tensor.data``): the module, its
    parameters and ties stay the same objects. Where something holds on to that memory itself (CUDA graphs, packed
    weights), use ``in_place``.

    Args:
        module: its parameters and persistent buffers are what the sink takes.
        mode: see `WeightSink`.
        keep_shared: use memory that the source shares, as it is, instead of copying it.
        exclude: names that are not synced.
        lora: "adapter": of a peft model take one adapter's tensors only.
        adapter: which one.
        after_flip: called when the weights are new: reset caches of old ones here.
    """

    framework: Framework = "torch"

    def __init__(
        self, module: nn.Module, mode: Mode = "double_buffer", *, keep_shared: bool = True,
        exclude: Collection[str] = (), lora: Literal["", "adapter"] = "", adapter: str = "default",
        after_flip: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        if lora:
            from rlmesh.weights.lora import lora_tensors

            tensors, _, kinds, left = lora_tensors(module, lora, adapter)
        else:
            tensors, kinds, left = named_tensors(module)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in exclude}
        self._manifest = manifest_of(tensors, kinds, (*exclude, *left))
        self.mode: Mode = mode
        self.device = str(next(iter(tensors.values())).device) if tensors else "cpu"
        # All objects that show one memory: each gets the new one.
        self._targets: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            same = self._targets.setdefault(self._manifest.owner(name).name, [])
            if all(known is not tensor for known in same):
                same.append(tensor)
        self._keep, self._after_flip = keep_shared, after_flip or (lambda: None)
        self._staged: dict[str, Tensor] = {}
        self._previous: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}

    def manifest(self) -> Manifest:
        return self._manifest

    def begin(self, version: int) -> None:
        # Copies go into the memory of the version before, which nobody can go back to any more.
        self._spare = {} if self._keep and self.device == "cpu" else self._previous or self._spare
        self._previous, self._staged = {}, {}

    def stage(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        import torch

        with torch.no_grad():
            for owner, sent in self._manifest.by_owner(tensors).items():
                target = self._targets[owner][0].detach()
                if self.mode == "in_place":
                    target.copy_(sent, non_blocking=True)
                elif keep and self._keep and sent.dtype == target.dtype and sent.device == target.device:
                    self._staged[owner] = sent
                else:
                    self._staged[owner] = self._copy(owner, sent, target)
        if not self.device.startswith("cpu"):
            # What was copied from may be used again when this returns.
            torch.cuda.current_stream(torch.device(self.device)).synchronize()

    def stage_summed(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """`stage` of tensors on a GPU that gives checksums by name, of what was copied, in the same pass where types
        and layouts allow it."""
        import torch

        from rlmesh.weights.cuda import copy_with_checksums

        with torch.no_grad():
            sources, targets, owners = [], [], []
            others = {}
            for owner, sent in self._manifest.by_owner(tensors).items():
                mine = self._targets[owner][0].detach()
                target = mine if self.mode == "in_place" else self._back(owner, mine)
                if sent.dtype == target.dtype and target.is_contiguous() and target.is_cuda and sent.numel():
                    sources.append(sent.reshape(-1).view(torch.uint8))
                    targets.append(target.reshape(-1).view(torch.uint8))
                    owners.append(owner)
                else:
                    others[owner] = sent
                if self.mode == "double_buffer":
                    self._staged[owner] = target
            sums = dict(zip(owners, copy_with_checksums(sources, targets), strict=True))
            for owner, sent in others.items():
                flat = sent.reshape(-1)
                piece = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
                (sums[owner],) = copy_with_checksums([piece], None)
                target = self._targets[owner][0].detach() if self.mode == "in_place" else self._staged[owner]
                target.copy_(sent, non_blocking=True)
            torch.cuda.current_stream(torch.device(self.device)).synchronize()
        return {name: sums[self._manifest.owner(name).name] for name in tensors}

    def _copy(self, owner: str, sent: Tensor, target: Tensor) -> Tensor:
        back = self._back(owner, target)
        back.copy_(sent, non_blocking=True)
        return back

    def _back(self, owner: str, target: Tensor) -> Tensor:
        """Memory beside what is in use."""
        import torch

        back = self._spare.get(owner)
        if back is None:
            back = self._spare[owner] = torch.empty_like(target)
        return back

    def flip(self, version: int) -> None:
        if self.mode == "double_buffer":
            missing = self._targets.keys() - self._staged.keys()
            if missing:
                raise WeightSyncError(f"{sorted(missing)[:5]} did not come")
            self._previous = self._swap(self._staged)
            self._staged = {}
        self._after_flip()

    def _swap(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        old = {}
        for owner, tensor in new.items():
            old[owner] = self._targets[owner][0].data
            for target in self._targets[owner]:
                target.data = tensor
        return old

    def rollback(self) -> None:
        self._spare = self._swap(self._previous)
        self._previous = {}
        self._after_flip()

    def discard(self) -> None:
        self._staged = {}
