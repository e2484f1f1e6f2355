"""The life of a job as a state machine: events in, actions out. No I/O, no clock of its own, no processes.

Members go starting → bound → ready → running → finished → stopping → exited; ``failed`` is reached from any
of them. The job goes starting → running → stopping → succeeded, failed or stopped::

    all agents there  → plan, reserve ports, spawn
    all members ready → running: every member is told to run
    all drivers done  → stopping: teardown of the drivers, then of the others
    all members gone  → succeeded
    any failure       → (a moment to find the first cause) → everybody is stopped → failed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlmesh.errors import PlacementError
from rlmesh.job.status import ExitInfo, FailureInfo, JobStatus, MemberState, MetricRecord
from rlmesh.master import events as ev
from rlmesh.master.causes import Failure, Weight, death_message, first_causes, is_settled
from rlmesh.master.context import JobContext, Member, MemberId
from rlmesh.master.deadlines import Deadlines
from rlmesh.master.jobspec import JobSpec
from rlmesh.master.scheduler import Scheduler, by_node
from rlmesh.placement.inventory import NodeInfo

LastLines = Callable[[str], tuple[str, ...]]
"""Reads the last lines of the log file at a path."""

SERVING: frozenset[MemberState] = frozenset({"ready", "running", "finished"})
_DOING: dict[MemberState, str] = {
    "starting": "while it started",
    "bound": "while it was set up",
    "ready": "while it served calls",
    "running": "during run()",
    "finished": "after run()",
    "stopping": "during teardown()",
}
# Of code that a ready member runs only run() is reported; it may have failed before the news that it began.
_PHASE: dict[MemberState, str] = {
    "starting": "could not start",
    "bound": "could not be set up",
    "ready": "failed in run()",
    "running": "failed in run()",
    "finished": "failed",
    "stopping": "failed in teardown()",
}


class JobManager:
    """Decides what happens to a job. ``handle`` is all there is; ``context`` is read by others.

    Args:
        spec: the job.
        scheduler: makes the plan.
        now: time of the start, seconds since the epoch.
        last_lines: reads the end of a member's log, for messages about members that cannot be asked.
    """

    def __init__(
        self, spec: JobSpec, scheduler: Scheduler, now: float, last_lines: LastLines = lambda path: ()
    ) -> None:
        self.context = JobContext(spec, started_at=now)
        self.ports: dict[str, int] = {}
        self._spec = spec
        self._scheduler = scheduler
        self._last_lines = last_lines
        self._limits = spec.limits
        self._failures: list[Failure] = []
        self._settle_at: float | None = None
        self._deadlines = Deadlines(spec.limits, now)
        self._actions: list[ev.Action] = []

    @property
    def ended(self) -> bool:
        return self.context.stage in ("succeeded", "failed", "stopped")

    def status(self, records_from: int = 0) -> JobStatus:
        return self.context.status(records_from)

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event in and say what to do about it. Never raises for anything that may arrive."""
        self._actions = []
        if not self.ended:
            self._dispatch(event, now)
            self._look_at_deadlines(now)
            self._advance(now)
        return self._actions

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.AgentRegistered(node):
                self._agent_registered(node, now)
            case ev.AgentLost(node_rank, how):
                self._agent_lost(node_rank, how, now)
            case ev.PortReserved(role, port):
                self.ports[role] = port
                self._spawn_if_ready(now)
            case ev.Spawned(_, pids):
                for role, rank, pid in pids:
                    self.context.members[role, rank].pid = pid
            case ev.ActionFailed(node_rank, what, error):
                name = self._node_name(node_rank)
                self._fail(Weight.OWN, FailureInfo(f"node {name}: {what} failed: {error}", at=now), now)
            case ev.Reported(record):
                self._reported(record, now)
            case ev.StopRequested(reason, grace_s):
                self._stop(reason, grace_s, now)
            case ev.MemberExited(_, exit):
                self._member_exited(exit, now)
            case ev.Tick():
                pass
            case _:
                self._member_event(event, now)

    def _member_event(
        self,
        event: ev.MemberBound | ev.MemberReady | ev.RunBegan | ev.RunFinished | ev.MemberFailed,
        now: float,
    ) -> None:
        member = self.context.members.get((event.role, event.rank))
        if member is None or member.incarnation != event.incarnation or member.gone:
            return
        match event:
            case ev.MemberBound(pid=pid, endpoint=endpoint):
                member.pid, member.endpoint = pid, endpoint
                if member.state == "starting":
                    member.enter("bound", now)
                self._actions.append(ev.PublishBook(self.context.new_book()))
            case ev.MemberReady():
                if member.state in ("starting", "bound"):
                    member.enter("ready", now)
                if self.context.first_serving_s is None:
                    self.context.first_serving_s = self._since_submit(now)
            case ev.RunBegan(has_run=has_run):
                member.has_run = has_run
                if has_run and member.state == "ready":
                    member.in_run = True
                    member.enter("running", now)
            case ev.RunFinished():
                member.has_run, member.in_run = True, False
                if member.state in ("ready", "running"):
                    member.enter("finished", now)
            case ev.MemberFailed(error=error, traceback=traceback, from_call=from_call):
                self._member_failed(member, error, traceback, from_call, now)

    # Start

    def _agent_registered(self, node: NodeInfo, now: float) -> None:
        if self.context.plan is not None:
            return
        self.context.nodes[node.node_rank] = node
        if len(self.context.nodes) < self._spec.nnodes:
            return
        self._deadlines.agents_at = None
        try:
            plan = self._scheduler.plan(self.context.nodes.values())
        except PlacementError as error:
            self._fail(Weight.DEATH, FailureInfo(str(error), at=now), now)
            return
        self.context.plan = plan
        self.context.note = "; ".join(plan.notes)
        for placement in plan.placements:
            log_path = self._scheduler.log_path(placement.role, placement.rank)
            member = Member(placement, log_path, since=now)
            self.context.members[member.id] = member
        for role, node_rank in self._scheduler.group_leaders(plan).items():
            self._actions.append(ev.ReservePort(role, node_rank))
        self._spawn_if_ready(now)

    def _spawn_if_ready(self, now: float) -> None:
        plan = self.context.plan
        if plan is None or self._failures or set(self._scheduler.group_leaders(plan)) - set(self.ports):
            return
        for node_rank, members in by_node(plan).items():
            self._actions.append(ev.Spawn(node_rank, members))
        for member in self.context.members.values():
            member.spawned = True
            member.enter("starting", now)

    # Failure

    def _member_failed(self, member: Member, error: str, traceback: str, from_call: bool, now: float) -> None:
        if member.ended_by_us:
            return  # its calls failed, or it was interrupted, because the job is ending
        message = f"{member.name} (pid {member.pid}) {_PHASE.get(member.state, 'failed')}: {error}"
        info = FailureInfo(message, *member.id, at=now, remote_traceback=traceback)
        member.enter("failed", now)
        self._fail(Weight.FOLLOWS if from_call else Weight.OWN, info, now)

    def _member_exited(self, exit: ExitInfo, now: float) -> None:
        member = self.context.members.get((exit.role, exit.rank))
        if member is None or member.incarnation != exit.incarnation or member.exit is not None:
            return
        doing = _DOING.get(member.state, "")
        told = member.state == "failed"
        expected = member.ended_by_us or (member.asked_to_end and exit.ok)
        member.exit = exit
        if told:
            self._failures = [f.with_exit(exit) if f.of(*member.id) else f for f in self._failures]
            self.context.failures = first_causes(self._failures)
        else:
            member.enter("exited" if expected else "failed", now)
        if not (expected or told):
            message = death_message(exit, doing)
            self._fail(Weight.DEATH, FailureInfo(message, *member.id, at=exit.at, exit=exit), now)
        if self.context.stage in ("starting", "running"):
            self._actions.append(ev.AnnounceLoss(exit))

    def _agent_lost(self, node_rank: int, how: str, now: float) -> None:
        members = [m for m in self.context.members.values() if m.placement.node_rank == node_rank]
        names = ", ".join(member.name for member in members) or "none"
        message = f"the agent of node {self._node_name(node_rank)} {how}; its members ended with it: {names}"
        self._fail(Weight.DEATH, FailureInfo(message, at=now), now)
        for member in members:
            if not member.gone:
                member.exit = ExitInfo(*member.id, member.incarnation, member.pid, None, 9, now, node_rank)
                member.enter("failed", now)
                self._actions.append(ev.AnnounceLoss(member.exit))

    def _fail(self, weight: Weight, info: FailureInfo, now: float) -> None:
        """Note a failure. Once everybody was told to end, later ones are consequences and not noted."""
        if self.context.ends_as != "succeeded":
            return
        self._failures.append(Failure(weight, info))
        self.context.failures = first_causes(self._failures)
        if self._settle_at is None:
            self._settle_at = now + self._limits.settle_s

    # End

    def _stop(self, reason: str, grace_s: float, now: float) -> None:
        if self.context.ends_as == "succeeded" and not self._failures:
            self.context.ends_as = "stopped"
            self.context.note = f"stopped: {reason}"
            self._end_all(reason, grace_s, now)

    def _end_all(self, reason: str, grace_s: float, now: float) -> None:
        self.context.stage = "stopping"
        living = self._living()
        if bound := tuple(member.id for member in living if member.endpoint):
            self._actions.append(ev.AskToStop(bound, reason))
        self._stop_members(living, grace_s, now)

    def _stop_members(self, members: Iterable[Member], grace_s: float, now: float) -> None:
        of_node: dict[int, list[MemberId]] = {}
        for member in members:
            member.asked_to_end = member.ended_by_us = True
            if member.state != "failed":
                member.enter("stopping", now)
            of_node.setdefault(member.placement.node_rank, []).append(member.id)
        for node_rank, ids in of_node.items():
            self._actions.append(ev.StopMembers(node_rank, tuple(ids), grace_s))
        self._deadlines.exits_at = now + grace_s + self._limits.exit_s

    def _advance(self, now: float) -> None:
        """Go to the next stage if it is time."""
        context = self.context
        settled = is_settled(self._failures) or (self._settle_at is not None and now >= self._settle_at)
        if self._failures and settled and context.ends_as == "succeeded":
            context.ends_as = "failed"
            self._end_all("the job failed", self._limits.fail_grace_s, now)
        members = context.members.values()
        if context.stage == "starting" and members and all(m.state in SERVING for m in members):
            context.stage = "running"
            context.all_serving_s = self._since_submit(now)
            self._actions += [ev.BeginRun(member.id) for member in members]
        if context.stage == "running" and not self._failures:
            self._end_if_driven(now)
        if context.stage == "stopping":
            self._end_if_gone(now)

    def _end_if_driven(self, now: float) -> None:
        members = self.context.members.values()
        if any(member.has_run is None for member in members):
            return
        drivers = self._drivers()
        if idle := [m.name for m in drivers if not m.has_run]:
            message = f"{', '.join(idle)} should drive the job but has no run() method: define run(self)"
            self._fail(Weight.OWN, FailureInfo(message, at=now), now)
        elif not drivers:
            message = "no role drives the job: none has a run() method; define run(self) in one of them"
            self._fail(Weight.OWN, FailureInfo(message, at=now), now)
        elif all(member.state == "finished" for member in drivers):
            self.context.stage = "stopping"
            self._teardown(drivers, now)

    def _drivers(self) -> list[Member]:
        named = self._spec.drivers()
        roles = {role.name: role for role in self._spec.roles}
        return [
            member
            for member in self.context.members.values()
            if (member.placement.role in named if named is not None
                else member.has_run and roles[member.placement.role].driver is not False)
        ]  # fmt: skip

    def _living(self) -> list[Member]:
        return [member for member in self.context.members.values() if not member.gone]

    def _teardown(self, members: Sequence[Member], now: float) -> None:
        if busy := tuple(member.id for member in members if member.state == "running"):
            self._actions.append(ev.AskToStop(busy, "the roles that drive the job are done"))
            self._deadlines.runs_at = now + self._spec.grace_s
        for member in members:
            member.enter("stopping", now)
            member.asked_to_end = True
            self._actions.append(ev.Teardown(member.id))
        self._deadlines.teardown_at = now + self._limits.teardown_s

    def _end_if_gone(self, now: float) -> None:
        living = self._living()
        if self.context.ends_as == "succeeded" and not self._failures:
            waiting = [member for member in living if member.state != "stopping"]
            if waiting and len(waiting) == len(living):  # the drivers are gone
                self._teardown(waiting, now)
        if not living:
            if self._failures and self.context.ends_as == "succeeded":
                self.context.ends_as = "failed"
            self.context.stage = self.context.ends_as

    # Time

    def _look_at_deadlines(self, now: float) -> None:
        if self.context.ends_as == "succeeded" and not self._failures:
            for weight, info in self._deadlines.passed(self.context, now, self._last_lines):
                self._fail(weight, info, now)
            if self.context.stage == "starting":
                self.context.note = self._deadlines.waiting_for(self.context, now) or self.context.note
        if self._deadlines.take("runs_at", now):
            self._end_late([member for member in self._living() if member.in_run], "run() did not stop", now)
        if self._deadlines.take("teardown_at", now):
            limit = f"{self._limits.teardown_s:g} s"
            late = [member for member in self._living() if member.asked_to_end]
            self._end_late(late, f"teardown() took longer than {limit}", now)
        if self._deadlines.take("exits_at", now):
            for member in self._living():
                if member.ended_by_us:
                    member.exit = ExitInfo(*member.id, member.incarnation, member.pid, None, None, now)
                    member.enter("failed", now)
                    self.context.note = f"{member.name} (pid {member.pid}): its end was never reported"

    def _end_late(self, members: Sequence[Member], why: str, now: float) -> None:
        if members:
            self.context.note = f"{', '.join(member.name for member in members)}: {why}; ended by a signal"
            self._stop_members(members, self._spec.grace_s, now)

    def _reported(self, record: MetricRecord, now: float) -> None:
        self.context.add_record(record)
        member = self.context.members.get((record.role, record.rank))
        if member is not None:
            member.step, member.last_beat_at = record.step, now

    def _since_submit(self, now: float) -> float:
        return now - (self._spec.submitted_at or self.context.started_at)

    def _node_name(self, node_rank: int) -> str:
        node = self.context.nodes.get(node_rank)
        return node.name if node else str(node_rank)
