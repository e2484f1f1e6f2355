"""What the parts that serve calls need of their runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.future import Future
from rlmesh.wire.envelope import Buffer
from rlmesh.wire.passed import RemoteRef

__all__ = ["ServingHost"]


class ServingHost(Protocol):
    """What dispatch needs of its runtime."""

    def fetch(self, elsewhere: RemoteRef, timeout_s: float | None) -> Future[Any]:
        """A result that another process keeps."""
        ...

    def capture(self, buffers: Sequence[memoryview], rest_bytes: int = 0) -> Sequence[Buffer]:
        """Frames of large buffers that no longer change."""
        ...

    def post_to_user(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run ``fn`` on the loop that runs ``async def`` methods of members; at once where that loop runs."""
        ...

    def system_exit(self, code: object) -> None:
        """User code called ``sys.exit``."""
        ...

    def watch_backlog(self, channel: Channel) -> None:
        """A peer does not take its answers in. On the runtime's loop."""
        ...
