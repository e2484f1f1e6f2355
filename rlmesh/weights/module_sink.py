"""Weights of torch modules that are used: `ModuleSink`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rlmesh.errors import WeightSyncError
from rlmesh.weights.arrays import OTHER
from rlmesh.weights.manifest import Kind, Manifest
from rlmesh.weights.module_source import manifest_of, named_tensors
from rlmesh.weights.planning.plan import Mode
from rlmesh.weights.protocols import Framework
from rlmesh.weights.transfer.module_snapshot import ModuleSnapshot
from rlmesh.weights.transfer.tensor_bytes import Placed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlmesh.weights.planning.buckets import BucketEntry


@dataclass(eq=False)
class _Memory:
    """One memory for all weights, by the names of their owners; a `double_buffer` sink has two, used in turn.

    Attributes:
        tensors: empty while it is in use: then it is the module's alone, which may be moved, or let go of.
        addresses: of its tensors, in the order of the sink's.
        lent: it is shared with the source, and must not be written to.
        layouts: entries that it has room for, as was found out in an earlier push, and their owners.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    addresses: list[int] = field(default_factory=list)
    lent: bool = False
    layouts: dict[int, tuple[Sequence[BucketEntry], list[str], tuple[int, ...]]] = field(default_factory=dict)


@dataclass(eq=False)
class _Swap:
    """All that is to know of a swap before it is done.

    Attributes:
        pairs: tensors of the module, and the memory that each gets.
        addresses: of that memory, in the order of the sink's tensors.
        before, tensors: the memory that is in use, and its tensors by owner.
    """

    pairs: list[tuple[Tensor, Tensor]]
    addresses: list[int]
    before: _Memory
    tensors: dict[str, Tensor]

    def do(self) -> _Memory:
        """Gives what was in use."""
        for target, memory in self.pairs:
            target.data = memory
        self.before.tensors = self.tensors
        return self.before


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
        self._module, self._asked = module, (tuple(exclude), lora, adapter)
        self.mode: Mode = mode
        self._keep, self._after_flip = keep_shared, after_flip or (lambda: None)
        self._seen: ModuleSnapshot | None = None
        self._manifest = Manifest(())
        self._look()

    def _look(self) -> None:
        """Take what the module has now, if it is not what it had; memory for the tensors before is of no use then."""
        if self._seen is None or not self._seen.is_current():
            tensors, kinds, excluded = self._found()
            seen, self._seen = self._seen, ModuleSnapshot(self._module, tensors, places=False)
            if seen is None or not seen.has(tensors):
                self._take(tensors, kinds, excluded)

    def _found(self) -> tuple[dict[str, Tensor], dict[str, Kind], tuple[str, ...]]:
        """Tensors by name, what kind each is, and the names that are left out."""
        exclude, lora, adapter = self._asked
        if lora:
            from rlmesh.weights.lora import lora_tensors

            tensors, _, kinds, left = lora_tensors(self._module, lora, adapter)
        else:
            tensors, kinds, left = named_tensors(self._module)
        return {name: tensor for name, tensor in tensors.items() if name not in exclude}, kinds, (*exclude, *left)

    def _take(self, tensors: dict[str, Tensor], kinds: dict[str, Kind], excluded: tuple[str, ...]) -> None:
        manifest = manifest_of(tensors, kinds, excluded)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        self.device = str(next(iter(tensors.values())).device) if tensors else "cpu"
        # All objects that show one memory: each gets the new one.
        self._targets: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            same = self._targets.setdefault(self._manifest.owner(name).name, [])
            if all(known is not tensor for known in same):
                same.append(tensor)
        self._staged: dict[str, Tensor] = {}
        self._staged_is_lent = False
        self._next: _Swap | None = None
        self._spare = _Memory()
        self._current: _Memory | None = None
        self._previous: _Memory | None = None
        self._owners: dict[str, tuple[tuple[str, ...], str | None]] = {}
        self._specs = {name: (same[0].dtype, same[0].numel()) for name, same in self._targets.items()}

    def _must_be_current(self) -> None:
        if self._seen is None or (not self._seen.is_current(forms=False) and not self._seen.has(self._found()[0])):
            raise WeightSyncError(
                "the engine replaced parameters of its module during the push: the next one finds them"
            )

    def manifest(self) -> Manifest:
        self._look()
        return self._manifest

    def begin(self, version: int) -> None:
        before = self._manifest
        self._look()
        if self._manifest is not before:
            raise WeightSyncError(OTHER)
        # Copies go into the memory of the version before, which nobody can go back to any more; not if it is the
        # source's.
        if self._previous is not None:
            self._spare = _Memory() if self._previous.lent else self._previous
        self._previous, self._next, self._staged, self._staged_is_lent = None, None, {}, False

    def let_go(self) -> None:
        """Free all memory that is not in use; there is nothing to go back to then."""
        self._previous, self._next, self._staged, self._spare = None, None, {}, _Memory()

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
                    self._staged_is_lent = True
                else:
                    back = self._staged[owner] = self._back(owner, target)
                    back.copy_(sent, non_blocking=True)
        if not self.device.startswith("cpu"):
            # What was copied from may be used again when this returns.
            torch.cuda.current_stream(torch.device(self.device)).synchronize()

    # Memory that whoever receives writes to.

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
                spare.layouts[id(entries)] = entries, owners, Placed(rooms).addresses
            return rooms
        _, owners, addresses = known
        filled = {owner: spare.tensors[owner] for owner in owners}
        self._staged.update(filled)
        return Placed(filled.values(), addresses)

    def _room(self, entry: BucketEntry, owner: str | None) -> Tensor | None:
        if owner is None:
            return None
        target = self._targets[owner][0]
        if self.mode == "double_buffer":
            target = self._back(owner, target)
        dtype, numel = self._specs[owner]
        # An engine that sleeps may have let go of its memory.
        there = target.numel() == numel and (bool(target.data_ptr()) or not numel)
        return target if there and target.dtype is dtype is _wire_type(entry) and target.is_contiguous() else None

    def _owner(self, entry: BucketEntry) -> str | None:
        """Whose memory a tensor goes to; None if it goes to several, which the source ties and this module does not."""
        known = self._owners.get(entry.name)
        if known is None or known[0] != entry.tied:
            names = (entry.name, *entry.tied)
            owners = {self._manifest.owner(n).name for n in names if self._manifest.find(n) is not None}
            known = self._owners[entry.name] = entry.tied, owners.pop() if len(owners) == 1 else None
        return known[1]

    def takes_parts(self) -> bool:
        return all(same[0].is_contiguous() for same in self._targets.values())

    def _back(self, owner: str, target: Tensor) -> Tensor:
        """Memory beside what is in use."""
        import torch

        back = self._spare.tensors.get(owner)
        if back is None:
            back = self._spare.tensors[owner] = torch.empty_like(target, requires_grad=False)
        return back

    # Which memory is in use.

    def prepare_flip(self) -> None:
        """While the last copies are under way: whatever of a flip can be done before. Nothing if more is to come."""
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
            staged = _Memory(lent=True) if self._staged_is_lent else self._spare
            self._previous = swap.do()
            staged.addresses, staged.tensors = swap.addresses, {}
            self._current, self._staged, self._spare = staged, {}, _Memory()
        else:
            self._must_be_current()
        self._after_flip()

    def _swap_to(self, new: Mapping[str, Tensor]) -> _Swap:
        """Using other memory instead of what is in use."""
        self._must_be_current()
        old = [same[0].data for same in self._targets.values()]
        addresses = [tensor.data_ptr() for tensor in old]
        before = self._current
        if before is None or before.addresses != addresses or before.lent:
            # It came with the module, or was moved since.
            before = _Memory(addresses=addresses, lent=before is not None and before.lent)
        pairs = [(target, new[owner]) for owner, same in self._targets.items() for target in same]
        addresses = [new[owner].data_ptr() for owner in self._targets]
        return _Swap(pairs, addresses, before, dict(zip(self._targets, old, strict=True)))

    def rollback(self) -> None:
        if self._previous is not None:
            back = self._previous
            new = self._swap_to(back.tensors).do()
            back.tensors = {}
            self._spare = _Memory() if new.lent else new
            self._current, self._previous = back, None
        self._after_flip()

    def discard(self) -> None:
        self._staged, self._next = {}, None


def _wire_type(entry: BucketEntry) -> object:
    """torch's type of what travels."""
    import torch

    return getattr(torch, entry.dtype)
