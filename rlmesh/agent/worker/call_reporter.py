"""Reports of a member's calls and waits to the master: once a second, more often at first, and only if there are
any."""

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
"""Seconds before the first report, so that a job that fails early has its graph."""
EVERY_S = 1.0
MOST_SHOWN = 16
QUEUED_S = 0.5
"""A member's waits are reported if a call has been unanswered for this many seconds."""


class CallReporter:
    """Sends the call-graph edges of one member to the master, from the runtime's loop.

    Args:
        runtime: the runtime whose calls are reported.
        master: the master, whose ``observed`` is notified.
        name: the member as ``ROLE:rank``.
        incarnation: the member's incarnation.
        run_dir: the job's run directory, for traces of single calls.
        board: the activity board, on which the reporter marks that the loop runs.
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
        self._runtime.call_soon(self._again)

    def note_calls(self) -> None:
        """Trace single calls as well, from now on. On the runtime's loop."""
        if self._trace is None:
            role, _, rank = self._name.rpartition(":")
            self._trace = CallTrace(self._run_dir, role, int(rank))
            self._runtime.trace_calls(self._trace.add)

    def close(self) -> None:
        """Send and write the remaining reports. Can be called from any thread."""
        self.flush()
        if self._trace is not None:
            self._trace.close()

    def flush(self) -> None:
        """Send the edges seen since the last time. Can be called from any thread; never waits and never fails."""
        if edges := self._runtime.take_edges():
            self._master.notify("observed", self._name, edges)

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(self._pause_s, self._tick)

    def _report_blocked(self) -> None:
        try:
            waits = self._runtime.blocked(QUEUED_S)
        except Exception:  # it inspects frames of unknown code
            logger.exception("%s cannot report what waits here", self._name)
            return
        if waits or self._was_blocked:
            self._runtime.notify_aside(self._master, "blocked", self._name, self._incarnation, waits)
        self._was_blocked = bool(waits)

    def _report_running_on(self) -> None:
        """Report calls that run although they were cancelled or timed out."""
        calls = [call for call in self._runtime.running_on(EVERY_S) if not call.method.startswith("@")]
        if calls or self._ran_on:
            self._runtime.notify_aside(
                self._master, "runs_on", self._name, self._incarnation, tuple(calls[:MOST_SHOWN])
            )
        self._ran_on = bool(calls)

    def _tick(self) -> None:
        if self._board is not None:
            self._board.beat()
        self.flush()
        self._report_blocked()
        self._report_running_on()
        if self._trace is not None:
            self._trace.flush()
        self._pause_s = min(EVERY_S, 1.5 * self._pause_s)
        self._again()
