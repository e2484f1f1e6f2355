"""The life of a job as a state machine: events in, actions out. No I/O, no clock of its own, no processes.

Members go starting → bound → ready → running → finished → stopping → exited; ``failed`` is reached from any
of them, and from there ``restarting`` → starting, where the role's rule allows it. The job goes starting →
running → stopping → succeeded, failed or stopped::

    all agents registered → plan, reserve ports, spawn
    all members ready     → running: every member is told to run
    a member dies         → restarted, alone or with others (decisions.failure_handling), or:
    any other failure     → (a moment to find the first cause) → everybody is stopped → failed
    all drivers done      → stopping: teardown of the drivers, then of the others (decisions.ending)
    all members gone      → succeeded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlmesh.agent.protocol import MemberProcess
from rlmesh.errors import PlacementError
from rlmesh.job.status import ENDED, SERVING, FailureInfo, JobStatus, MetricRecord
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.adoption import repeated_orders, strays, unreported
from rlmesh.master.decisions.ending import Ending
from rlmesh.master.decisions.failover import FailoverCoordinator
from rlmesh.master.decisions.failure_handling import FailureHandler
from rlmesh.master.decisions.job_state import DecisionState, JobState, LastLines
from rlmesh.master.decisions.node_loss import NodeLosses
from rlmesh.master.decisions.recovery import Recoveries
from rlmesh.master.decisions.replacement import ReplacementPlanner
from rlmesh.master.decisions.root_cause import Weight
from rlmesh.master.decisions.scheduler import Scheduler, by_node
from rlmesh.master.jobspec import JobSpec
from rlmesh.master.monitoring.health_watch import HealthWatch
from rlmesh.placement.machine.inventory import NodeInfo


class JobManager:
    """Decides what happens to a job. Events go to ``handle``; other modules read ``context``.

    Args:
        spec: the job.
        scheduler: makes the plan.
        now: time of the start, seconds since the epoch.
        last_lines: reads the end of a member's log, for messages about members that cannot be asked.
        context, decisions: state of an earlier master of this job; by default those of a new job.
    """

    def __init__(
        self, spec: JobSpec, scheduler: Scheduler, now: float, last_lines: LastLines = lambda path: (), *,
        context: JobContext | None = None, decisions: DecisionState | None = None,
    ) -> None:  # fmt: skip
        self.context = context or JobContext.initial(spec, now)
        self.decisions = decisions or DecisionState.initial(spec, now)
        self._state = JobState(self.context, self.decisions, last_lines)
        self._scheduler = scheduler
        self._ending = Ending(self._state)
        self._recoveries = Recoveries(self._state)
        placements = ReplacementPlanner(self._state, scheduler)
        rules = {role.name: role.restart for role in spec.roles}
        sizes = {role.name: role.members for role in spec.roles}
        failover = FailoverCoordinator(rules, sizes, spec.demand.fusions)
        self._losses = NodeLosses(self._state, failover, placements, self._recoveries)
        self._failures = FailureHandler(self._state, failover, placements, self._recoveries, self._ending)
        self._health = HealthWatch(self._state, self._failures.died)
        self.activity_of: Callable[[Member], str] = lambda member: ""
        """Returns what a member that does not answer is doing, for messages; empty if nothing is known."""
        self.watcher: Callable[[ev.Event, Sequence[ev.Action], float], None] | None = None
        """Called with each handled event, the actions that followed, and the time."""

    @property
    def ended(self) -> bool:
        return self.context.stage in ENDED

    @property
    def ports(self) -> dict[str, int]:
        """Port of each elastic role's process group."""
        return self.decisions.ports

    def wanted_nodes(self) -> set[int]:
        """Return the lost nodes for which a replacement machine is needed."""
        return set(self.context.lost_nodes) if self._recoveries.unplaced() else set()

    def status(self, records_from: int = 0) -> JobStatus:
        return self.context.status(records_from)

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Handle one event and return the actions to carry out. Never raises for any event."""
        self._state.actions = []
        if not self.ended:
            self._dispatch(event, now)
            self._check_deadlines(now)
            self._advance(now)
            if self.watcher is not None:
                self.watcher(event, self._state.actions, now)
        return self._state.actions

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.AgentRegistered(node, running):
                self._agent_registered(node, running, now)
            case ev.MasterReturned(number):
                self.context.note = f"the master died and was started again (master {number} of this job)"
                self._state.do(*repeated_orders(self.context, self.decisions.stop))
            case ev.AgentLost(node_rank, how):
                if (failure := self._losses.lost(node_rank, how, now)) is not None:
                    self._failures.fail(Weight.DEATH, failure, now)
            case ev.PortReserved(role) if role in self.decisions.ports and not self.decisions.ports_asked.get(role):
                pass  # an order that a new master repeated: processes may have been started with the port before
            case ev.PortReserved(role, port, node_rank):
                self.decisions.ports[role] = port
                self._recoveries.port_reserved(role, node_rank)
                self._spawn_if_ready(now)
            case ev.Spawned(node_rank, pids):
                for role, rank, pid in pids:
                    member = self.context.members[role, rank]
                    if member.state == "starting" and member.placement.node_rank == node_rank:
                        member.pid = pid
            case ev.ActionFailed(node_rank) if node_rank in self.context.lost_nodes:
                pass  # the action is carried out on another node
            case ev.ActionFailed(node_rank, what, error):
                name = self._state.node_name(node_rank)
                self._failures.fail(Weight.OWN, FailureInfo(f"node {name}: {what} failed: {error}", at=now), now)
            case ev.Reported(record):
                self._reported(record, now)
            case ev.AlarmRaised(alarm):
                self.context.add_alarm(alarm)
            case ev.StopRequested(reason, grace_s):
                self._stop(reason, grace_s, now)
            case ev.NoticeGiven(reason, within_s, grace_s):
                self._notice(reason, within_s, grace_s, now)
            case ev.MemberExited(_, exit):
                self._failures.process_exited(exit, now)
            case ev.CircleFound(_, text):
                self.context.note = text
            case ev.ProgressSeen() | ev.StacksTaken() | ev.DeviceFailed():
                if isinstance(event, ev.DeviceFailed):
                    self.decisions.bad_devices.add(event.uuid)
                self._health.take(event, now)
            case ev.Tick():
                pass
            case _:
                self._member_event(event, now)

    def _member_event(
        self,
        event: ev.MemberBound | ev.MemberReady | ev.RunBegan | ev.RunFinished | ev.MemberFailed | ev.StepHeld
        | ev.StoppedAt | ev.TeardownUnheard,
        now: float,
    ) -> None:  # fmt: skip
        member = self.context.members.get((event.role, event.rank))
        if member is None or member.incarnation != event.incarnation or member.gone:
            return
        match event:
            case ev.MemberBound(pid=pid, endpoint=endpoint, public=public):
                member.pid, member.endpoint, member.public = pid, endpoint, public
                if member.state == "starting":
                    member.enter("bound", now)
                self._state.do(ev.PublishBook(self.context.new_book()))
            case ev.MemberReady(restored=restored):
                if member.restart is not None:
                    member.restart = member.restart.with_restored(member.placement.rank, restored)
                self._member_ready(member, now)
            case ev.RunBegan(has_run=has_run):
                member.has_run = has_run
                if has_run and member.state == "ready":
                    member.in_run = True
                    member.enter("running", now)
                    if member in self._ending.drivers():
                        self._state.do(*self.decisions.stop.run_began(member.id))
            case ev.RunFinished():
                member.has_run, member.in_run, member.has_finished = True, False, True
                if member.state in ("ready", "running"):
                    member.enter("finished", now)
                self._state.do(*self.decisions.stop.run_ended(member.id))
            case ev.StepHeld(step=step):
                self._state.do(*self.decisions.stop.step_held(member.id, step))
            case ev.StoppedAt(step=step):
                if wrong := self.decisions.stop.stopped(member.id, step):
                    self._failures.fail(Weight.OWN, FailureInfo(wrong, *member.id, at=now), now)
            case ev.TeardownUnheard(why=why):
                self._ending.teardown_failed(member, why, now)
            case ev.MemberFailed():
                self._failures.member_failed(member, event, now)

    def _member_ready(self, member: Member, now: float) -> None:
        if member.state in ("starting", "bound"):
            member.enter("finished" if member.has_finished else "ready", now)
        if member.hidden:
            member.hidden = False
            self._state.do(ev.PublishBook(self.context.new_book()))
        if self.context.first_serving_s is None:
            self.context.first_serving_s = self._since_submit(now)

    # Start

    def _agent_registered(self, node: NodeInfo, running: tuple[MemberProcess, ...], now: float) -> None:
        self.context.nodes[node.node_rank] = node
        self._losses.back(node.node_rank, now)
        if extra := strays(self.context, node.node_rank, running):
            self._state.do(ev.EndProcesses(node.node_rank, extra, 0.0))
        if self.context.plan is not None:
            if doubtful := unreported(self.context, self.decisions.recoveries, node.node_rank, running):
                self._state.do(ev.CheckMembers(node.node_rank, doubtful))
            return
        if len(self.context.nodes) < self._state.spec.nnodes:
            return
        self.decisions.deadlines.agents_at = None
        try:
            plan = self._scheduler.plan(self.context.nodes.values())
        except PlacementError as error:
            self._failures.fail(Weight.DEATH, FailureInfo(str(error), at=now), now)
            return
        self.context.plan = plan
        self.context.note = "; ".join(plan.notes)
        for placement in plan.placements:
            log_path = self._scheduler.log_path(*(placement.process or (placement.role, placement.rank)))
            member = Member(placement, log_path, since=now)
            self.context.members[member.id] = member
        for role, node_rank in self._scheduler.group_leaders(plan).items():
            self._state.do(ev.ReservePort(role, node_rank))
        self._spawn_if_ready(now)

    def _spawn_if_ready(self, now: float) -> None:
        """Start all members for the first time, when ports and plan are there."""
        plan = self.context.plan
        if plan is None or self._failures or any(member.spawned for member in self.context.members.values()):
            return
        if set(self._scheduler.group_leaders(plan)) - set(self.decisions.ports) or self.context.restarts:
            return
        for node_rank, members in by_node(plan).items():
            self._state.do(ev.Spawn(node_rank, members))
        for member in self.context.members.values():
            member.spawned = True
            member.enter("starting", now)

    # End

    def _stop(self, reason: str, grace_s: float, now: float) -> None:
        if self._state.undecided and not self._failures:
            self.context.ends_as = "stopped"
            self.context.note = f"stopped: {reason}"
            self._recoveries.abandon()
            self._ending.end_all(reason, grace_s, now)

    def _notice(self, reason: str, within_s: float, grace_s: float, now: float) -> None:
        """Begin a common stop because the job must end soon. Before the drivers run there is nothing to save."""
        if not self._state.undecided or self.context.stage not in ("starting", "running"):
            return
        self.context.resumable = True
        if self.context.stage == "starting":
            self._stop(reason, grace_s, now)
        elif self.decisions.stop.notice(reason, within_s, grace_s, now):
            self.context.note = f"{reason}: all ranks stop at the same step"

    def _advance(self, now: float) -> None:
        """Move the job to the next stage if it is time."""
        context = self.context
        self._failures.check(now)
        if self._state.undecided and not self._failures:
            self._health.check(now)
        if self._state.undecided and (stuck := self._losses.overdue(now) or self._recoveries.advance(now)) is not None:
            self._failures.fail(Weight.DEATH, stuck, now)
            self._failures.settle(now)
        members = context.members.values()
        if context.stage == "starting" and members and all(m.state in SERVING for m in members):
            context.stage = "running"
            context.all_serving_s = self._since_submit(now)
            self._state.do(*(ev.BeginRun(member.id) for member in members))
        if context.stage == "running" and self.decisions.stop.wanted and all(m.has_run is not None for m in members):
            self._state.do(*self.decisions.stop.begin(m.id for m in self._ending.drivers() if m.in_run))
            if context.spec.serves and not self._ending.drivers():
                self._stop(
                    self.decisions.stop.reason, self.decisions.stop.grace_s, now
                )  # No driver has a step to stop at.
        if context.stage == "running" and not self._failures:
            self._end_if_driven(now)
        if context.stage == "stopping":
            self._ending.end_if_gone(bool(self._failures), now)

    def _end_if_driven(self, now: float) -> None:
        members = self.context.members.values()
        if any(member.has_run is None for member in members):
            return
        drivers = self._ending.drivers()
        if idle := [m.name for m in drivers if not m.has_run]:
            message = f"{', '.join(idle)} should drive the job but has no run() method: define run(self)"
            self._failures.fail(Weight.OWN, FailureInfo(message, at=now), now)
        elif not drivers:
            if self.context.spec.serves:
                return
            message = (
                "no role drives the job: none has a run() method; define run(self) in one of them, or start a job that "
                "only serves calls by start(), which lets the caller drive it"
            )
            self._failures.fail(Weight.OWN, FailureInfo(message, at=now), now)
        elif all(member.state == "finished" for member in drivers):
            self.context.stage = "stopping"
            if unfinished := self._recoveries.abandon():
                self._ending.stop_members(unfinished, self._state.limits.fail_grace_s, now)
            self._ending.teardown(drivers, now)

    # Time

    def _check_deadlines(self, now: float) -> None:
        if self._state.undecided and not self._failures:
            for weight, info in self.decisions.deadlines.passed(
                self.context, now, self._state.last_lines, self.activity_of
            ):
                self._failures.fail(weight, info, now)
            if self.context.stage == "starting":
                self.context.note = self.decisions.deadlines.waiting_for(self.context, now) or self.context.note
        if self.context.stage == "running":
            running = [member.name for member in self._ending.drivers() if member.in_run]
            if why := self.decisions.stop.expired(now, running):
                self._stop(why, self.decisions.stop.grace_s, now)
        self._ending.check_deadlines(now)

    def _reported(self, record: MetricRecord, now: float) -> None:
        self.context.add_record(record)
        member = self.context.members.get((record.role, record.rank))
        if member is not None:
            member.step, member.last_beat_at = record.step, now

    def _since_submit(self, now: float) -> float:
        return now - (self._state.spec.submitted_at or self.context.started_at)
