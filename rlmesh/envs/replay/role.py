"""A replay buffer as a role of a job, and the client that looks like the buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmesh import BaseWorkload, RoleGroup, rpc
from rlmesh.errors import UsageError

__all__ = ["RemoteReplay", "ReplayRole"]


class ReplayRole(BaseWorkload):
    """Serves the buffer that `make` returns; inherit from this class and write `make`.

    ::

        class Replay(ReplayRole):
            def make(self):
                return PrioritizedReplayBuffer(1_000_000, seed=self.rank)

        RLJobBuilder()….role("REPLAY").run(Replay).total(1)

    Runners add to it and learners sample from it without a third process between them; batches travel as arrays. A
    member that replaces a failed one begins with an empty buffer, unless somebody restores a state.
    """

    def make(self) -> Any:
        """The buffer of this member: any class of `rlmesh.envs.replay`."""
        raise UsageError(f"{type(self).__name__} has no buffer: write `make(self)`, which returns one")

    def setup(self) -> None:
        self.buffer = self.make()

    @rpc
    def add(self, batch: Any) -> int:
        """Add a batch and return the number of stored transitions."""
        self.buffer.add(batch)
        return len(self.buffer)

    @rpc
    def sample(self, count: int, options: dict[str, Any]) -> dict[str, Any]:
        """A batch of the buffer's ``sample``."""
        batch: dict[str, Any] = self.buffer.sample(count, **options)
        return batch

    @rpc
    def update_priorities(self, arguments: tuple[Any, ...]) -> Any:
        """Set priorities of sampled transitions."""
        if not hasattr(self.buffer, "update_priorities"):
            raise UsageError(
                f"{self.name}: {type(self.buffer).__name__} has no priorities; return a PrioritizedReplayBuffer in make"
            )
        return self.buffer.update_priorities(*arguments)

    @rpc
    def size(self) -> int:
        """Number of stored transitions."""
        return len(self.buffer)

    @rpc
    def state(self) -> dict[str, Any]:
        """The buffer's state, for a checkpoint."""
        state: dict[str, Any] = self.buffer.state()
        return state

    @rpc
    def restore(self, state: dict[str, Any]) -> None:
        """Replace the buffer's content by a state."""
        self.buffer.restore(state)


class RemoteReplay:
    """The buffer of one member of a replay role, with the buffer's own methods; each waits for its result.

    Args:
        role: name of the role, or its group.
        rank: the member whose buffer this is; with several members each has a buffer of its own.
    """

    def __init__(self, role: str | RoleGroup = "REPLAY", rank: int = 0) -> None:
        self._member = (RoleGroup(role) if isinstance(role, str) else role)[rank]

    def __len__(self) -> int:
        return self._member.call(ReplayRole.size).result()

    def add(self, batch: Any) -> int:
        """Add a batch and return the number of stored transitions."""
        return self._member.call(ReplayRole.add, batch).result()

    def sample(self, count: int, **options: Any) -> dict[str, Any]:
        """A batch of the buffer's ``sample``."""
        return self._member.call(ReplayRole.sample, count, options).result()

    def update_priorities(self, *arguments: Any) -> Any:
        """Set priorities of sampled transitions."""
        return self._member.call(ReplayRole.update_priorities, arguments).result()

    def state(self) -> dict[str, Any]:
        """The buffer's state, for a checkpoint."""
        return self._member.call(ReplayRole.state).result()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the buffer's content by a state."""
        self._member.call(ReplayRole.restore, dict(state)).result()
