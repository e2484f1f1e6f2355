"""Reports of a member's calls and waits to the master, and traces of its single calls on disk.

Reports are sent once a second, more often at first, and only if there are any. With ``rlmesh launch --timeline`` each
ended call is also traced, for ``rlmesh timeline``: one line per flush in ``<run_dir>/timeline/<ROLE>-<rank>.jsonl``::

    {"offset_ns": …, "dropped": 0, "calls": [[callee, method, started_ns, ended_ns, answered, executed_ns, queued_ns,
                                              sent_bytes, received_bytes], …]}

``offset_ns`` added to a time gives ns since the epoch. The callee's side needs no file: the answer carries how long the
call was queued and ran there. Of very many calls the longest and an even sample are stored, and of very long jobs the
end: a member never has more than ``2 * FILE_BYTES`` on disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rlmesh.observe.files.append_file import TIMELINE_FOLDER, AppendFile
from rlmesh.runtime.calling.call_stats import EndedCall
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import clock
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.serving.activity_board import Board

__all__ = ["CallReporter", "CallTrace"]

logger = logging.getLogger(__name__)

FIRST_S = 0.1
"""Seconds before the first report, so that a job that fails early has its graph."""
EVERY_S = 1.0
MOST_SHOWN = 16
QUEUED_S = 0.5
"""A member's waits are reported if a call has been unanswered for this many seconds."""
FILE_BYTES = 8 << 20
PER_FLUSH = 2000
"""Calls stored per flush."""
MOST_PENDING = 50_000
"""Calls that may wait for a flush; further calls are only counted."""


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
        self._runtime.post(self._again)

    def note_calls(self) -> None:
        """Trace single calls as well, from now on. On the runtime's loop."""
        if self._trace is None:
            role, _, rank = self._name.rpartition(":")
            self._trace = CallTrace(self._run_dir, role, int(rank))
            self._runtime.activity.call_stats.trace = self._trace.add

    def close(self) -> None:
        """Send and write the remaining reports. Can be called from any thread."""
        self.flush()
        if self._trace is not None:
            self._trace.close()

    def flush(self) -> None:
        """Send the edges seen since the last time. Can be called from any thread; never waits and never fails."""
        if edges := self._runtime.activity.call_stats.take_edges():
            self._master.notify("observed", self._name, edges)

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(self._pause_s, self._tick)

    def _report_blocked(self) -> None:
        try:
            waits = self._runtime.activity.blocked(QUEUED_S)
        except Exception:  # it inspects frames of unknown code
            logger.exception("%s cannot report what waits here", self._name)
            return
        if waits or self._was_blocked:
            self._runtime.activity.notify_aside(self._master, "blocked", self._name, self._incarnation, waits)
        self._was_blocked = bool(waits)

    def _report_running_on(self) -> None:
        """Report calls that run although they were cancelled or timed out."""
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
        self._report_blocked()
        self._report_running_on()
        if self._trace is not None:
            self._trace.flush()
        self._pause_s = min(EVERY_S, 1.5 * self._pause_s)
        self._again()


class CallTrace:
    """Collects the ended calls of one member and writes them on flush.

    Args:
        run_dir: the job's run directory.
        role, rank: the member.
    """

    def __init__(self, run_dir: Path, role: str, rank: int) -> None:
        self._path = run_dir / TIMELINE_FOLDER / f"{role}-{rank}.jsonl"
        self._file = AppendFile(self._path)
        self._pending: list[EndedCall] = []
        self._dropped = 0
        self._written = self._path.stat().st_size if self._path.exists() else 0
        self._broken = False
        self._turn = threading.RLock()
        """The runtime's thread adds and flushes, and the main thread closes."""

    def add(self, calls: Sequence[EndedCall]) -> None:
        """Add calls. Can be called from any thread."""
        with self._turn:
            room = MOST_PENDING - len(self._pending)
            self._pending += calls[: max(0, room)]
            self._dropped += max(0, len(calls) - max(0, room))

    def flush(self) -> None:
        """Write the collected calls. A disk error ends the trace, and nothing else."""
        with self._turn:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        dropped, self._dropped = self._dropped, 0
        calls = [call for call in pending if not call[0].startswith("@")]
        kept = chosen(calls, PER_FLUSH)
        if self._broken or not (kept or dropped):
            return
        line = json.dumps(
            {
                "offset_ns": round(clock.epoch() * 1e9) - time.perf_counter_ns(),
                "dropped": dropped + len(calls) - len(kept),
                "calls": [(*call[:2], *call[3:10]) for call in kept],
            },
            separators=(",", ":"),
        )
        try:
            if self._written > FILE_BYTES:
                self._file.close()
                os.replace(self._path, self._path.with_suffix(".old.jsonl"))
                self._written = 0
            self._file.append(line.encode() + b"\n")
            self._written += len(line)
        except OSError as error:
            self._broken = True
            logger.warning("the timeline ends here, %s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Write the remaining calls; later calls are not traced."""
        with self._turn:
            self._flush()
            self._broken = True
            self._file.close()


def chosen(calls: Sequence[EndedCall], most: int) -> list[EndedCall]:
    """At most ``most`` of the calls, in order: the longest, and an even sample of the others."""
    if len(calls) <= most:
        return list(calls)
    longest = sorted(range(len(calls)), key=lambda at: calls[at][4] - calls[at][3], reverse=True)[: most // 2]
    left = most - len(longest)
    sample = (at * len(calls) // left for at in range(left))
    return [calls[at] for at in sorted({*longest, *sample})]
