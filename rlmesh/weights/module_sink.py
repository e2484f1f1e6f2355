"""`ModuleSink`: weights of a torch module that is used, for instance by an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rlmesh.errors import WeightSyncError
from rlmesh.weights.arrays import CHANGED
from rlmesh.weights.cuda.copies import AddressedTensors
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.module_tensors import ModuleTensors, manifest_of, module_tensors
from rlmesh.weights.planning.plan import Mode
from rlmesh.weights.protocols import Framework
from rlmesh.weights.transfer.module_snapshot import ModuleSnapshot

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlmesh.weights.planning.buckets import BucketEntry


@dataclass(eq=False)
class _WeightBuffer:
    """Memory for all weights, by the names of their owners; a `double_buffer` sink alternates between two.

    Attributes:
        tensors: empty while the buffer is in use: then only the module refers to it, and may move or free it.
        addresses: of its tensors, in the order of the sink's tensors.
        borrowed: it is the source's memory, and must not be written to.
        layouts: entries that fit into it, as found by an earlier push, with their owners and addresses.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    addresses: list[int] = field(default_factory=list)
    borrowed: bool = False
    layouts: dict[int, tuple[Sequence[BucketEntry], list[str], tuple[int, ...]]] = field(default_factory=dict)


@dataclass(eq=False)
class _Swap:
    """A prepared swap of the module's memory.

    Attributes:
        pairs: tensors of the module, and the memory that each gets.
        addresses: of that memory, in the order of the sink's tensors.
        before, tensors: the buffer in use until the swap, and its tensors by owner.
    """

    pairs: list[tuple[Tensor, Tensor]]
    addresses: list[int]
    before: _WeightBuffer
    tensors: dict[str, Tensor]

    def do(self) -> _WeightBuffer:
        """Swap; returns the buffer that was in use."""
        for target, memory in self.pairs:
            target.data = memory
        self.before.tensors = self.tensors
        return self.before


class ModuleSink:
    """The weights of a module in this process.

    A `double_buffer` sink swaps the memory of parameters and buffers at the flip (``tensor.data``): the module, its
    parameters and ties stay the same objects. If other code refers to that memory (CUDA graphs, packed weights), use
    ``in_place``.

    Args:
        module: the sink takes its parameters and persistent buffers.
        mode: see `WeightSink`.
        keep_shared: use memory that the source shares directly, instead of copying it.
        exclude: names that are not synced.
        lora: "adapter": take only the tensors of one adapter of a peft model.
        adapter: name of the adapter.
        after_flip: called after each change of the weights: reset caches of old weights here.
    """

    framework: Framework = "torch"

    def __init__(
        self, module: nn.Module, mode: Mode = "double_buffer", *, keep_shared: bool = True,
        exclude: Collection[str] = (), lora: Literal["", "adapter"] = "", adapter: str = "default",
        after_flip: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self._module, self._options = module, (tuple(exclude), lora, adapter)
        self.mode: Mode = mode
        self._keep, self._after_flip = keep_shared, after_flip or (lambda: None)
        self._snapshot: ModuleSnapshot | None = None
        self._manifest = Manifest(())
        self._refresh()

    def _refresh(self) -> None:
        """Take the module's current tensors, if they have changed; buffers for the old tensors are dropped then."""
        if self._snapshot is None or not self._snapshot.is_current():
            found = self._module_tensors()
            before, self._snapshot = self._snapshot, ModuleSnapshot(self._module, found.tensors, places=False)
            if before is None or not before.has(found.tensors):
                self._take(found)

    def _module_tensors(self) -> ModuleTensors:
        return module_tensors(self._module, *self._options, strict=False)

    def _take(self, found: ModuleTensors) -> None:
        tensors = found.tensors
        manifest = manifest_of(tensors, found.kinds, found.excluded)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        self.device = str(next(iter(tensors.values())).device) if tensors else "cpu"
        # All tensor objects that share one memory: each gets the new memory.
        self._targets: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            same = self._targets.setdefault(self._manifest.owner(name).name, [])
            if all(known is not tensor for known in same):
                same.append(tensor)
        self._staged: dict[str, Tensor] = {}
        self._staged_is_borrowed = False
        self._next: _Swap | None = None
        self._spare = _WeightBuffer()
        self._current: _WeightBuffer | None = None
        self._previous: _WeightBuffer | None = None
        self._owners: dict[str, tuple[tuple[str, ...], str | None]] = {}
        self._specs = {name: (same[0].dtype, same[0].numel()) for name, same in self._targets.items()}

    def _must_be_current(self) -> None:
        snapshot = self._snapshot
        if snapshot is None or not (snapshot.is_current(forms=False) or snapshot.has(self._module_tensors().tensors)):
            raise WeightSyncError(
                "the engine replaced parameters of its module during the push: the next one finds them"
            )

    def manifest(self) -> Manifest:
        self._refresh()
        return self._manifest

    def begin(self, version: int) -> None:
        before = self._manifest
        self._refresh()
        if self._manifest is not before:
            raise WeightSyncError(CHANGED)
        # A new push rules out a rollback to the version before, so the copies go into that version's buffer, unless it
        # is the source's memory.
        if self._previous is not None:
            self._spare = _WeightBuffer() if self._previous.borrowed else self._previous
        self._previous, self._next, self._staged, self._staged_is_borrowed = None, None, {}, False

    def let_go(self) -> None:
        """Free all memory that is not in use; `rollback` does nothing then."""
        self._previous, self._next, self._staged, self._spare = None, None, {}, _WeightBuffer()

    def stage(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        import torch

        self._next = None
        with torch.no_grad():
            for owner, sent in self._manifest.by_owner(tensors).items():
                target = self._targets[owner][0].detach()
                if self.mode == "in_place":
                    target.copy_(sent, non_blocking=True)
                elif keep and self._keep and sent.dtype == target.dtype and sent.device == target.device:
                    self._staged[owner] = sent
                    self._staged_is_borrowed = True
                else:
                    back = self._staged[owner] = self._back(owner, target)
                    back.copy_(sent, non_blocking=True)
        if not self.device.startswith("cpu"):
            # The source of the copies may be reused when this returns.
            torch.cuda.current_stream(torch.device(self.device)).synchronize()

    # Memory into which the receiver writes.

    def rooms(self, entries: Sequence[BucketEntry], *, keep: bool) -> Sequence[Tensor | None]:
        if self.mode == "in_place":
            return [self._room(entry, self._owner(entry)) for entry in entries]
        if keep and self._keep and self.device == "cpu":
            return [None] * len(entries)
        spare, self._next = self._spare, None
        known = spare.layouts.get(id(entries))
        if known is None or known[0] is not entries:
            rooms = [self._room(entry, self._owner(entry)) for entry in entries]
            owners = [owner for owner in map(self._owner, entries) if owner is not None]
            self._staged.update((owner, spare.tensors[owner]) for owner in owners)
            if all(room is not None for room in rooms) and len(set(owners)) == len(rooms):
                spare.layouts[id(entries)] = entries, owners, AddressedTensors(rooms).addresses
            return rooms
        _, owners, addresses = known
        filled = {owner: spare.tensors[owner] for owner in owners}
        self._staged.update(filled)
        return AddressedTensors(filled.values(), addresses)

    def _room(self, entry: BucketEntry, owner: str | None) -> Tensor | None:
        if owner is None:
            return None
        target = self._targets[owner][0]
        if self.mode == "double_buffer":
            target = self._back(owner, target)
        dtype, numel = self._specs[owner]
        # A sleeping engine may have freed its memory.
        has_memory = target.numel() == numel and (bool(target.data_ptr()) or not numel)
        return target if has_memory and target.dtype is dtype is _wire_type(entry) and target.is_contiguous() else None

    def _owner(self, entry: BucketEntry) -> str | None:
        """The owner of the memory that an entry is written to; None if the source ties names that have separate memory
        here."""
        known = self._owners.get(entry.name)
        if known is None or known[0] != entry.tied:
            names = (entry.name, *entry.tied)
            owners = {self._manifest.owner(n).name for n in names if self._manifest.find(n) is not None}
            known = self._owners[entry.name] = entry.tied, owners.pop() if len(owners) == 1 else None
        return known[1]

    def takes_parts(self) -> bool:
        return all(same[0].is_contiguous() for same in self._targets.values())

    def _back(self, owner: str, target: Tensor) -> Tensor:
        """Memory for a tensor in the buffer that is not in use."""
        import torch

        back = self._spare.tensors.get(owner)
        if back is None:
            back = self._spare.tensors[owner] = torch.empty_like(target, requires_grad=False)
        return back

    # Swapping buffers.

    def prepare_flip(self) -> None:
        """Prepare the swap while the last copies run; does nothing if tensors are missing."""
        if self.mode == "double_buffer" and self._staged.keys() == self._targets.keys():
            self._next = self._swap_to(self._staged)

    def flip(self, version: int) -> None:
        if self.mode == "double_buffer":
            swap, self._next = self._next, None
            if swap is None:
                missing = self._targets.keys() - self._staged.keys()
                if missing:
                    raise WeightSyncError(f"{sorted(missing)[:5]} did not come")
                swap = self._swap_to(self._staged)
            staged = _WeightBuffer(borrowed=True) if self._staged_is_borrowed else self._spare
            self._previous = swap.do()
            staged.addresses, staged.tensors = swap.addresses, {}
            self._current, self._staged, self._spare = staged, {}, _WeightBuffer()
        else:
            self._must_be_current()
        self._after_flip()

    def _swap_to(self, new: Mapping[str, Tensor]) -> _Swap:
        """A swap to other memory."""
        self._must_be_current()
        old = [same[0].data for same in self._targets.values()]
        addresses = [tensor.data_ptr() for tensor in old]
        before = self._current
        if before is None or before.addresses != addresses or before.borrowed:
            # The memory in use is not a buffer of this sink: it came with the module, was moved since, or is borrowed
            # from the source.
            before = _WeightBuffer(addresses=addresses, borrowed=before is not None and before.borrowed)
        pairs = [(target, new[owner]) for owner, same in self._targets.items() for target in same]
        addresses = [new[owner].data_ptr() for owner in self._targets]
        return _Swap(pairs, addresses, before, dict(zip(self._targets, old, strict=True)))

    def rollback(self) -> None:
        if self._previous is not None:
            back = self._previous
            new = self._swap_to(back.tensors).do()
            back.tensors = {}
            self._spare = _WeightBuffer() if new.borrowed else new
            self._current, self._previous = back, None
        self._after_flip()

    def discard(self) -> None:
        self._staged, self._next = {}, None


def _wire_type(entry: BucketEntry) -> object:
    """Torch's type of a transferred entry."""
    import torch

    return getattr(torch, entry.dtype)
