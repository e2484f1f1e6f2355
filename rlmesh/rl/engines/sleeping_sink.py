"""`SleepingSink`: receives weights into a module, and frees their memory while the engine sleeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh import ModuleSink, VersionGate
from rlmesh.errors import WeightSyncError
from rlmesh.rl.engines.host_memory import empty_on_host
from rlmesh.rl.engines.rollout import SleepLevel
from rlmesh.rl.engines.training.offload import free_unused_gpu_memory

__all__ = ["SleepingSink"]


class SleepingSink(ModuleSink):
    """A module's sink that shares the engine's gate, and frees the memory while the engine sleeps.

    With ``lora`` it receives the adapter only. No push brings the base model, so it is never dropped: both levels of
    sleep move it to the host.
    """

    def __init__(self, model: nn.Module, mode: Any, gate: VersionGate, *, lora: bool) -> None:
        super().__init__(model, mode, lora="adapter" if lora else "")
        self.gate = gate
        self.changes = 0
        """Number of changes of the weights in use."""
        taken = {id(tensor) for same in self._targets.values() for tensor in same}
        every = (*model.parameters(), *model.buffers())
        self._base = [tensor for tensor in every if lora and id(tensor) not in taken]
        self._home = next(model.parameters()).device
        self._gone: dict[int, int] = {}
        self._copies: dict[int, Tensor] = {}
        self._missing: set[str | None] = set()

    def release(self, level: SleepLevel) -> None:
        self.let_go()
        if self._home.type != "cpu":
            self._move_to_host([[tensor] for tensor in self._base])
        if level == 1 and self._home.type != "cpu":
            self._move_to_host([*self._targets.values()])
        elif level == 2:
            self._gone = {}
            for tensors in self._targets.values():
                bare = torch.empty_like(tensors[0])  # new memory: the memory in use may be the source's
                self._gone[id(tensors[0])] = bare.untyped_storage().nbytes()
                bare.untyped_storage().resize_(0)
                for tensor in tensors:
                    tensor.data = bare
        if self._home.type == "cuda":
            free_unused_gpu_memory()

    def regain(self) -> None:
        if self._gone:
            for tensors in self._targets.values():
                tensors[0].data.untyped_storage().resize_(self._gone[id(tensors[0])])
            self._gone = {}
        elif self._home.type != "cpu":
            for tensors in self._targets.values():
                moved = tensors[0].data.to(self._home)
                for tensor in tensors:
                    tensor.data = moved
        for tensor in self._base:
            tensor.data = tensor.data.to(self._home)

    def _move_to_host(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Move tensors to host memory that is kept for the next sleep; those of a group share theirs."""
        new = [group[0] for group in groups if id(group[0]) not in self._copies]
        self._copies.update(zip(map(id, new), empty_on_host(new), strict=True))
        for group in groups:
            copy = self._copies[id(group[0])].copy_(group[0].data)
            for tensor in group:
                tensor.data = copy

    def begin(self, version: int) -> None:
        if self._gone:
            raise WeightSyncError("the engine sleeps and has no memory for weights: call wake() before the push")
        self._missing = set(self._targets)
        super().begin(version)

    def rooms(self, entries: Sequence[Any], *, keep: bool) -> Sequence[Tensor | None]:
        found = super().rooms(entries, keep=keep)
        # The receiver writes these entries directly into the buffers, so stage() never sees them: they have arrived.
        written = (entry for entry, room in zip(entries, found, strict=True) if room is not None)
        self._missing -= {owner for entry in written if (owner := self._owner(entry)) is not None}
        return found

    def stage(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        super().stage(tensors, keep=keep)
        self._missing -= self._manifest.by_owner(tensors).keys()

    def flip(self, version: int) -> None:
        if self._missing:
            raise WeightSyncError(
                f"no weights came for {len(self._missing)} tensors, such as {min(map(str, self._missing))}"
            )
        super().flip(version)
        self.changes += 1

    def rollback(self) -> None:
        super().rollback()
        self.changes += 1
