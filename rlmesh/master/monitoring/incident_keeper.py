"""Incident files of a running job: opens one for a failure, adds later information, closes it.

An incident covers all failures until everybody serves again, or until the job has ended, because they may be
consequences of the first cause.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.agent.monitoring.logs import last_lines
from rlmesh.job.status import ENDED, ExitInfo, FailureInfo
from rlmesh.master.context import JobContext, Member
from rlmesh.master.monitoring.graph import Touched, describe_touched
from rlmesh.observe.files.event_log import EventLog, plain
from rlmesh.observe.files.incidents import Incident, incident_files, next_number

__all__ = ["AskStacks", "IncidentKeeper"]

logger = logging.getLogger(__name__)

AskStacks = Callable[[Member], Awaitable[str]]
"""Asks a member for its threads' stacks; returns a text or raises."""

BEFORE_S = 10.0
"""Seconds before a failure was noticed during which exits may belong to it."""
EVERY_S = 0.25
"""Minimum seconds between two writes of an open incident."""
FIRST_WRITE_S = 0.05
"""Seconds before the first write, so that members that wait for the dead one are notified first."""
MOST_MEMBERS = 64
"""Maximum number of members that are asked and shown; in larger jobs, those that the failure affects."""
LINES = 20
SHOWN_EARLIER = 10


class IncidentKeeper:
    """Writes the incidents of one job. ``update`` is called after every event.

    Times are seconds since the epoch, without jumps.

    Args:
        log: log of the job's events.
        ask_stacks: asks one member.
        doing: returns what a member is doing that its state does not show.
    """

    def __init__(
        self, context: JobContext, log: EventLog, ask_stacks: AskStacks,
        doing: Callable[[Member], str] = lambda member: "",
    ) -> None:  # fmt: skip
        self._context, self._log, self._ask = context, log, ask_stacks
        self._doing = doing
        self._run_dir = Path(context.spec.run_dir)
        self._open: Incident | None = None
        self._restarts_from = 0
        self._restarts_seen = len(context.restarts)
        self._failed_before = bool(context.failures)
        self._exits: list[tuple[float, ExitInfo]] = []
        """Exits with the time of their report, since a node's clock may differ."""
        self._dirty, self._written_at = False, 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        context.incidents = [str(path.with_suffix(".txt")) for path in incident_files(self._run_dir)]

    def exited(self, exit: ExitInfo, now: float) -> None:
        """Record that a member's process ended, intended or not."""
        self._exits = [(at, known) for at, known in self._exits if at > now - BEFORE_S]
        self._exits.append((now, exit))
        if self._open is not None and not exit.ok:
            self._add_exit(self._open, exit)

    def update(self, now: float) -> None:
        """Open, update or close the incident, following the job's state."""
        context = self._context
        failing = bool(context.failures) and not self._failed_before
        if self._open is None and (len(context.restarts) > self._restarts_seen or failing):
            self._open_one(now)
        incident = self._open
        if incident is None:
            return
        failures = self._failures()
        if failures != incident.failures:
            incident.failures, self._dirty = failures, True
            incident.earlier = self._earlier(failures)
        if outcome := self._outcome():
            incident.outcome, incident.closed_at = outcome, now
            self._gather_events(incident)
            self._write(incident, now)
            self._open = None
            self._restarts_seen, self._failed_before = len(context.restarts), bool(context.failures)
        elif self._dirty and now - self._written_at >= EVERY_S:
            self._gather_events(incident)
            self._write(incident, now)

    async def close(self, now: float) -> None:
        """Write the open incident, with the stacks that have arrived."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=EVERY_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._open is not None:
            self._gather_events(self._open)
            self._write(self._open, now)

    def _open_one(self, now: float) -> None:
        context, spec = self._context, self._context.spec
        self._restarts_from = self._restarts_seen
        job = {"name": spec.job_name, "id": spec.job_id, "run_dir": spec.run_dir, "stage": context.stage}
        incident = Incident(next_number(self._run_dir), job, now, self._failures(), config=self._config())
        incident.earlier = self._earlier(incident.failures)
        for _, exit in self._exits:
            if not exit.ok:
                self._add_exit(incident, exit)
        touched = self._touched(incident)
        incident.doing = {member.name: doing for member in context.members.values() if (doing := self._doing(member))}
        incident.steps = {member.name: member.step for member in context.members.values()}
        for member in self._shown(touched):
            if member.endpoint and not member.gone and member.name not in incident.exits:
                task = asyncio.get_running_loop().create_task(self._stacks(incident, member))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._open = incident
        self._dirty, self._written_at = True, now - EVERY_S + FIRST_WRITE_S

    def _shown(self, touched: Touched) -> list[Member]:
        members = list(self._context.members.values())
        if len(members) > MOST_MEMBERS:
            members = [member for member in members if member.name in {*touched.failed, *touched.all}]
        return members[:MOST_MEMBERS]

    async def _stacks(self, incident: Incident, member: Member) -> None:
        try:
            text = await self._ask(member)
        except Exception as error:
            text = f"could not be asked: {type(error).__name__}: {error}"
        incident.stacks[member.name] = text
        self._dirty = True
        if incident is not self._open and incident.path is not None:  # already closed: write it again
            self._write(incident, incident.closed_at or incident.opened_at)

    def _touched(self, incident: Incident) -> Touched:
        """Return the members that the incident affects, by the current graph."""
        first = incident.failures[0] if incident.failures else None
        names = [f"{first.role}:{first.rank}"] if first and first.role is not None else list(incident.exits)
        touched = self._context.graph.touched_by(names)
        incident.touched = describe_touched(touched) if names else ""
        return touched

    def _failures(self) -> list[FailureInfo]:
        restarts = [record.failure for record in self._context.restarts[self._restarts_from :]]
        if self._context.ends_as == "failed":
            own = list(self._context.failures)
            first_at = own[0].at if own else 0.0
            found = own + [failure for failure in restarts if failure not in own and failure.at >= first_at]
        else:
            found = restarts + [failure for failure in self._context.failures if failure not in restarts]
        return [self._context.shown_failure(failure) for failure in found]

    def _earlier(self, failures: list[FailureInfo]) -> list[str]:
        """Return earlier restarts that are not related to the first cause."""
        if not failures:
            return []
        at = failures[0].at
        restarts = map(self._context.shown_restart, self._context.restarts)
        others = [record for record in restarts if record.at < at and record.failure not in failures]
        return [
            f"{at - record.at:.1f} s before: {record.cause}"
            + ("" if record.ready_at is None else f"; served again after {record.ready_at - record.at:.1f} s")
            for record in others[-SHOWN_EARLIER:]
        ]

    def _outcome(self) -> str:
        """Return how the incident ended; empty while it is open."""
        context = self._context
        if context.stage in ENDED:
            return f"the job {context.stage}"
        restarts = context.restarts[self._restarts_from :]
        if context.failures or not restarts or any(record.ready_at is None for record in restarts):
            return ""
        return "; ".join(
            f"{record.unit} was started again (scope {record.scope}) and served after "
            f"{(record.ready_at or record.at) - record.at:.2f} s"
            for record in restarts
        )

    def _add_exit(self, incident: Incident, exit: ExitInfo) -> None:
        name = f"{exit.role}:{exit.rank}"
        details: dict[str, Any] = plain(exit)
        lines = details.pop("last_log_lines", None)
        incident.exits[name] = {"how": exit.describe(), **details}
        if lines:
            incident.last_lines[name] = lines
        member = self._context.members.get((exit.role, exit.rank))
        if member is not None:
            node = self._context.nodes.get(member.placement.node_rank)
            incident.limits[name] = {
                "asked_bytes": member.placement.memory_bytes,
                "node_bytes": node.memory_bytes if node else 0,
            }
        self._dirty = True

    def _gather_events(self, incident: Incident) -> None:
        since = incident.events[0]["at"] if incident.events else None
        entries = [entry for entry in self._log.recent if since is None or entry["at"] >= since]
        incident.events = sorted(entries, key=lambda entry: float(entry["at"]))

    def _config(self) -> Any:
        try:
            return json.loads(private_files.read(self._run_dir / "job.json"))
        except (OSError, ValueError):
            return None

    def _write(self, incident: Incident, now: float) -> None:
        self._dirty, self._written_at = False, now
        touched = self._touched(incident)
        if incident.path is None:
            for member in self._shown(touched):
                if member.name not in incident.last_lines and (lines := last_lines(member.log_path, LINES)):
                    incident.last_lines[member.name] = list(lines)
        try:
            path = incident.write(self._run_dir)
        except OSError as error:
            logger.warning("incident %d cannot be written: %s", incident.number, error)
            return
        if (text := str(path.with_suffix(".txt"))) not in self._context.incidents:
            self._context.incidents.append(text)
