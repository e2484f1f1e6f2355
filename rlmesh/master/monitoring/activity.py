"""Activities of members that their states do not show: busy and not answering, stopped by a signal, still running a
call that was cancelled.

Agents inspect the processes of their node from outside; members report calls that run on. None of this is part of the
job's state: a restarted master asks again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlmesh.errors import CallError
from rlmesh.job.status import JobStatus, Serving
from rlmesh.runtime.handle import MemberHandle

__all__ = ["Activities", "ActivityPoller"]

logger = logging.getLogger(__name__)

POLL_S = 1.0
ANSWER_S = 2.0
FRESH_S = 4.0
"""Age in seconds from which a report is not shown any more."""
SHOWN = 3
_SECONDS = re.compile(r" for (\d+) s")

Key = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass(frozen=True, slots=True)
class _ActivityReport:
    at: float
    text: str = ""
    runs_on: tuple[Serving, ...] = ()


class Activities:
    """The latest reports about each member's activity. No I/O; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._silent: dict[Key, _ActivityReport] = {}
        self._runs_on: dict[tuple[str, int], _ActivityReport] = {}

    def inspected(self, node: Sequence[Key], silent: Mapping[Key, str], now: float) -> None:
        """Record an agent's inspection of its members; ``silent`` has those that do not answer, with the reason."""
        for key in node:
            if why := silent.get(key):
                self._silent[key] = _ActivityReport(now, why)
            else:
                self._silent.pop(key, None)

    def reported(self, name: str, incarnation: int, runs_on: tuple[Serving, ...], now: float) -> None:
        """Record the calls that run on in a member."""
        if runs_on:
            self._runs_on[name, incarnation] = _ActivityReport(now, runs_on=runs_on)
        else:
            self._runs_on.pop((name, incarnation), None)

    def of(self, key: Key, now: float) -> str:
        """Return a text such as ``busy in A:0.hold() for 7 s, does not answer``; empty if nothing is known."""
        parts = []
        report = self._silent.get(key)
        if report is not None and now - report.at <= FRESH_S:
            passed = int(now - report.at)
            parts.append(_SECONDS.sub(lambda found: f" for {int(found[1]) + passed} s", report.text))
        running = self._runs_on.get((f"{key[0]}:{key[1]}", key[2]))
        if running is not None and (now - running.at <= FRESH_S or parts):  # a silent member still does what it did
            later = now - running.at
            calls = [str(replace(call, since_s=call.since_s + later)) for call in running.runs_on]
            parts += [*calls[:SHOWN], *([f"and {len(calls) - SHOWN} more"] if len(calls) > SHOWN else [])]
        return "; ".join(parts)

    def added_to(self, status: JobStatus, now: float) -> JobStatus:
        """Return the snapshot with the activities of its members."""
        members = status.members
        doing = {
            m: self.of((m.role, m.rank, m.incarnation), now) for m in members if m.state not in ("exited", "failed")
        }
        return replace(status, members=tuple(replace(m, doing=doing.get(m, "")) for m in members))


class ActivityPoller:
    """Asks the agents for silent members about once a second.

    Args:
        agents: returns the agent of each node, with the members of the node.
    """

    def __init__(
        self, activities: Activities, agents: Callable[[], Sequence[tuple[MemberHandle, Sequence[Key]]]]
    ) -> None:
        self._activities, self._agents = activities, agents
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._poll_forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await asyncio.gather(*(self._poll(agent, keys) for agent, keys in self._agents() if keys))
            except Exception:  # a fault here must not affect the job
                logger.exception("the activities of members could not be asked for")

    async def _poll(self, agent: MemberHandle, keys: Sequence[Key]) -> None:
        try:
            silent: dict[Key, str] = await agent.options(timeout_s=ANSWER_S, idempotent=False).call("silent")
        except CallError:
            return
        self._activities.inspected(keys, silent, time.monotonic())
