"""A member tells the master whom it calls, and what waits in it for calls that others may never answer: once a second,
sooner at first, and only if there is something to tell."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rlmesh.agent.worker.tracing import CallTrace
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.serving.activity_board import Board

__all__ = ["CallReporter"]

logger = logging.getLogger(__name__)

FIRST_S = 0.1
"""So that a job that fails early has its graph."""
EVERY_S = 1.0
MOST_SHOWN = 16
QUEUED_S = 0.5
"""What waits in a member is told if it was asked something so long ago that it has not answered."""


class CallReporter:
    """Sends the edges of one member to the master, from the runtime's loop.

    Args:
        runtime: whose calls are told.
        master: the master, whose ``observed`` is notified.
        name: the member's, as ``ROLE:rank``.
        incarnation: the member's.
        run_dir: of the job, for single calls.
        board: where it says that the loop runs.
    """

    def __init__(
        self, runtime: Runtime, master: MemberHandle, name: str, incarnation: int, run_dir: Path,
        board: Board | None = None,
    ) -> None:  # fmt: skip
        self._runtime, self._master, self._name, self._run_dir = runtime, master, name, run_dir
        self._incarnation, self._board = incarnation, board
        self._was_blocked = self._ran_on = False
        self._pause_s = FIRST_S
        self._trace: CallTrace | None = None

    def start(self) -> None:
        self._runtime.post(self._again)

    def note_calls(self) -> None:
        """Note single calls as well, from now on. On the runtime's loop."""
        if self._trace is None:
            role, _, rank = self._name.rpartition(":")
            self._trace = CallTrace(self._run_dir, role, int(rank))
            self._runtime.activity.call_stats.trace = self._trace.add

    def close(self) -> None:
        """Send and write what is left. From any thread."""
        self.flush()
        if self._trace is not None:
            self._trace.close()

    def flush(self) -> None:
        """Send what was seen since the last time. From any thread; never waits and never fails."""
        if edges := self._runtime.activity.call_stats.take_edges():
            self._master.notify("observed", self._name, edges)

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(self._pause_s, self._tick)

    def _tell_blocked(self) -> None:
        try:
            waits = self._runtime.activity.blocked(QUEUED_S)
        except Exception:  # it looks into frames of code that it does not know
            logger.exception("%s cannot tell what waits here", self._name)
            return
        if waits or self._was_blocked:
            self._runtime.activity.notify_aside(self._master, "blocked", self._name, self._incarnation, waits)
        self._was_blocked = bool(waits)

    def _tell_running_on(self) -> None:
        """What runs although its call was cancelled or timed out."""
        calls = [call for call in self._runtime.activity.running_on(EVERY_S) if not call.method.startswith("@")]
        if calls or self._ran_on:
            self._runtime.activity.notify_aside(
                self._master, "runs_on", self._name, self._incarnation, tuple(calls[:MOST_SHOWN])
            )
        self._ran_on = bool(calls)

    def _tick(self) -> None:
        if self._board is not None:
            self._board.beat()
        self.flush()
        self._tell_blocked()
        self._tell_running_on()
        if self._trace is not None:
            self._trace.flush()
        self._pause_s = min(EVERY_S, 1.5 * self._pause_s)
        self._again()
