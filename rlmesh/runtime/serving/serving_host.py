"""The interface of a runtime that the serving side uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.future import Future
from rlmesh.wire.envelope import Buffer
from rlmesh.wire.passed import RemoteRef

__all__ = ["ServingHost"]


class ServingHost(Protocol):
    """The runtime's methods that the dispatcher calls."""

    def fetch(self, elsewhere: RemoteRef, timeout_s: float | None) -> Future[Any]:
        """Fetch a result that another process stores."""
        ...

    def capture(self, buffers: Sequence[memoryview], rest_bytes: int = 0) -> Sequence[Buffer]:
        """Frames of large buffers, which later changes of the buffers do not affect."""
        ...

    def post_to_user(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run ``fn`` on the loop of members' ``async def`` methods; at once if the calling thread runs that loop."""
        ...

    def system_exit(self, code: object) -> None:
        """Handle a call of ``sys.exit`` by user code."""
        ...

    def watch_backlog(self, channel: Channel) -> None:
        """Watch a peer that does not receive its replies. Runs on the runtime's loop."""
        ...
