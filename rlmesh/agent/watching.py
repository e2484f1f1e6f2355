"""A member tells the master whom it calls: once a second, and only if it called somebody."""

from __future__ import annotations

import asyncio

from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime

__all__ = ["CallReporter"]

FIRST_S = 0.2
"""So that a job that fails early has its graph."""
EVERY_S = 1.0


class CallReporter:
    """Sends the edges of one member to the master, from the runtime's loop.

    Args:
        runtime: whose calls are told.
        master: the master, whose ``observed`` is notified.
        name: the member's, as ``ROLE:rank``.
    """

    def __init__(self, runtime: Runtime, master: MemberHandle, name: str) -> None:
        self._runtime, self._master, self._name = runtime, master, name

    def start(self) -> None:
        self._runtime.call_soon(self._again, FIRST_S)

    def flush(self) -> None:
        """Send what was seen since the last time. From any thread; never waits and never fails."""
        if edges := self._runtime.take_edges():
            self._master.notify("observed", self._name, edges)

    def _again(self, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._tick)

    def _tick(self) -> None:
        self.flush()
        self._again(EVERY_S)
