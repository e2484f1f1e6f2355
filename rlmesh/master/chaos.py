"""Chaos kills of a job: waits for the planned moments and sends the signals.

Each kill happens once, also across restarts of the master: ``chaos.jsonl`` in the run directory is written before the
signal is sent. A kill at a call is armed in the member by wrapping its method, so that other calls cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rlmesh.agent.protocol import AGENT, CONTROL
from rlmesh.errors import CallError
from rlmesh.master import events as ev
from rlmesh.master.chaos_plan import MASTER, Kill, parse_kill
from rlmesh.master.context import JobContext, Member
from rlmesh.observe.files.append_file import AppendFile, read_json_lines
from rlmesh.runtime.runtime import Runtime

__all__ = ["CHAOS_FILE", "Chaos"]

logger = logging.getLogger(__name__)

CHAOS_FILE = "chaos.jsonl"
ASK_S = 5.0


class Chaos:
    """Carries out the planned kills of one job. ``handled`` is called after every event.

    Args:
        context: the job's context.
        runtime: connects to agents and members.
        kills: kills with ranks.
        clock: seconds since the epoch.
    """

    def __init__(
        self, context: JobContext, runtime: Runtime, kills: Sequence[Kill], clock: Callable[[], float]
    ) -> None:
        self._context, self._runtime, self._clock = context, runtime, clock
        run_dir = Path(context.spec.run_dir)
        self._file = AppendFile(run_dir / CHAOS_FILE)
        entries = _read(run_dir / CHAOS_FILE)
        self.done = [entry["kill"] for entry in entries if "kill" in entry]
        """Texts of the kills that happened."""
        asked = [*map(str, kills), *(entry["asked"] for entry in entries if "asked" in entry)]
        over = Counter([*self.done, *(entry["cannot"] for entry in entries if "cannot" in entry)])
        self.planned = [parse_kill(text) for text in (Counter(asked) - over).elements()]
        self.cannot: dict[str, str] = {}
        """Texts of the kills that cannot happen, with the reason."""
        self._armed: set[tuple[Kill, str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running_since: float | None = None

    def add(self, kills: Sequence[Kill]) -> None:
        """Plan more kills from now on; a kill that happened before may happen again."""
        for kill in kills:
            self._note({"asked": str(kill)})
        self.planned += kills
        self.handled(ev.Tick(), (), self._clock())

    def handled(self, event: ev.Event, actions: Sequence[ev.Action], now: float) -> None:
        """Carry out the kills that are due after an event."""
        if self._running_since is None and self._context.stage == "running":
            self._running_since = now
        for kill in list(self.planned):
            if kill.point == "call":
                self._arm(kill)
            elif self._is_time(kill, event, actions, now):
                self._begin(kill)

    async def reached(self, text: str) -> None:
        """Carry out a kill at a call that a member has reached; returns when the signal was sent."""
        for kill in self.planned:
            if str(kill) == text:
                self._mark(kill)
                await self._kill(kill)
                return

    def drop(self, text: str, why: str) -> bool:
        """Drop a kill that cannot happen; False if it is not planned."""
        for kill in self.planned:
            if str(kill) == text:
                self.planned.remove(kill)
                self.cannot[text] = why
                self._note({"cannot": text, "why": why})
                logger.warning("rehearsal %s cannot happen: %s", text, why)
                return True
        return False

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._file.close()

    def _is_time(self, kill: Kill, event: ev.Event, actions: Sequence[ev.Action], now: float) -> bool:
        match kill.point:
            case "now":
                return True
            case "start":
                if not isinstance(event, ev.MemberBound):
                    return False
                return not kill.is_member or (event.role, event.rank) == (kill.target, kill.rank)
            case "step":
                return isinstance(event, ev.Reported) and event.record.step >= kill.number
            case "after":
                return self._running_since is not None and now - self._running_since >= kill.number
            case "shutdown":
                if kill.is_member:
                    ending = [member for a in actions for member in _ended_by(a)]
                    return (kill.target, kill.rank) in ending
                return self._context.stage == "stopping"
            case "call":
                return False

    def _arm(self, kill: Kill) -> None:
        """Arm a kill at a call in every member where it may happen, once per process."""
        for member in self._context.members.values():
            own = member.id == (kill.target, kill.rank) if kill.target == kill.role else member.id[0] == kill.role
            key = (kill, member.name, member.incarnation)
            if own and member.endpoint and not member.gone and key not in self._armed:
                self._armed.add(key)
                self._do(self._arm_member(kill, member))

    async def _arm_member(self, kill: Kill, member: Member) -> None:
        control = self._runtime.peer(CONTROL, member.endpoint, incarnation=member.incarnation).options(timeout_s=ASK_S)
        await control.call("arm", kill.method, str(kill), member.name)

    def _begin(self, kill: Kill) -> None:
        self._mark(kill)
        self._do(self._kill(kill))

    def _mark(self, kill: Kill) -> None:
        self.planned.remove(kill)
        self.done.append(str(kill))
        self._note({"kill": str(kill)})
        logger.warning("rehearsal: %s", kill)

    def _note(self, entry: dict[str, Any]) -> None:
        try:
            self._file.append(json.dumps({"at": round(self._clock(), 6), **entry}).encode() + b"\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._file.path, error)

    async def _kill(self, kill: Kill) -> None:
        context = self._context
        if kill.target == MASTER:
            os.kill(os.getpid(), kill.signal)
            return
        if kill.is_member:
            member = context.members[kill.target, kill.rank or 0]
            node_rank, who = member.placement.node_rank, (*member.id, member.incarnation)
        else:
            node_rank, who = kill.rank or 0, None
        node = context.nodes.get(node_rank)
        if node is None:
            logger.warning("rehearsal: %s: there is no node %d", kill, node_rank)
            return
        agent = self._runtime.peer(AGENT, node.agent_endpoint).options(timeout_s=ASK_S)
        await agent.call("signal", who, kill.signal)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            try:
                await work
            except CallError as error:
                logger.info("rehearsal: %s", error)  # The killed process does not answer.

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ended_by(action: ev.Action) -> tuple[tuple[str, int], ...]:
    if isinstance(action, ev.Teardown):
        return (action.member,)
    return action.members if isinstance(action, ev.AskToStop | ev.StopMembers) else ()


def _read(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_json_lines(path) if isinstance(entry, dict)]
