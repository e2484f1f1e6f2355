"""State that all decision modules share: the job's context, the persisted decisions, and the actions to carry out.

`WaitDeadlines` says which member missed a deadline. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rlmesh.job.status import FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member, MemberId
from rlmesh.master.decisions.failover import Restart
from rlmesh.master.decisions.root_cause import Failures, Weight
from rlmesh.master.decisions.stop_together import StopTogether
from rlmesh.master.jobspec import JobSpec, TimeLimits
from rlmesh.master.monitoring.diagnosis import HealthState

SLOW_START_S = 10.0
SHOWN_NAMES = 5


@dataclass(slots=True)
class WaitDeadlines:
    """Deadlines of one job, in seconds since the epoch; None if a deadline is not armed."""

    agents_at: float | None = None
    runs_at: float | None = None
    teardown_at: float | None = None
    exits_at: float | None = None

    def passed(
        self, context: JobContext, now: float, last_lines: Callable[[str], tuple[str, ...]],
        activity_of: Callable[[Member], str] = lambda member: "",
    ) -> Iterator[tuple[Weight, FailureInfo]]:  # fmt: skip
        """Yield one failure for each start that took too long.

        Args:
            context: the job.
            now: seconds since the epoch.
            last_lines: reads the end of a member's log.
            activity_of: returns a text such as ``stopped for 4 s``; empty if nothing is known.
        """
        if self.agents_at is not None and now >= self.agents_at:
            missing = sorted(set(range(context.spec.nnodes)) - set(context.nodes))
            nodes = ", ".join(map(str, missing))
            message = (
                f"waited {context.spec.limits.agents_s:g} s for the agent of node {nodes}, which did not register. "
                f"See logs/agent-{missing[0]}.log in the run directory"
            )
            self.agents_at = None
            yield Weight.OWN, FailureInfo(message, at=now)
        for member in context.members.values():
            name, limit, awaited = _limit_of(member, context.spec.limits)
            if limit is not None and now - member.since >= limit:
                lines = last_lines(member.log_path)
                tail = "\n".join(("its last log lines:", *lines)) if lines else "its log is empty"
                who = f"{member.name} (pid {member.pid or 'unknown'})"
                doing = f" ({activity})" if (activity := activity_of(member)) else ""
                message = f"{who} did not {awaited} within {limit:g} s{doing}, see limits({name}=…); {tail}"
                yield Weight.OWN, FailureInfo(message, *member.id, at=now)

    def waiting_for(self, context: JobContext, now: float) -> str:
        """Return a note that names the members a slow start waits for; empty while the start is not slow."""
        if now - context.started_at < SLOW_START_S:
            return ""
        names = [m.name for m in context.members.values() if m.state in ("starting", "bound", "restarting")]
        shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
        return f"waiting for {len(names)} members to be set up: {shown}" if names else ""

    def take(self, which: Literal["runs_at", "teardown_at", "exits_at"], now: float) -> bool:
        """True if the deadline has passed; this disarms it."""
        at: float | None = getattr(self, which)
        if at is None or now < at:
            return False
        setattr(self, which, None)
        return True


def _limit_of(member: Member, limits: TimeLimits) -> tuple[str, float | None, str]:
    if member.state == "starting":
        return "start_s", limits.start_s, "start and bind its endpoint"
    if member.state == "bound":
        return "setup_s", limits.setup_s, "finish setup()"
    return "", None, ""


LastLines = Callable[[str], tuple[str, ...]]
"""Reads the last lines of the log file at a path."""


@dataclass(slots=True)
class Recovery:
    """One restart in progress.

    Attributes:
        members: the members to restart.
        start_at: earliest time of the new processes' start.
        gone_by: deadline for the end of the old processes.
        outgoing: old processes whose end is not reported yet, and the node of each.
        spawned: the new processes were ordered.
        unplaced: there is no room for the new processes yet.
    """

    restart: Restart
    members: set[MemberId]
    start_at: float
    gone_by: float
    outgoing: dict[ev.ProcessKey, int] = field(default_factory=dict)
    spawned: bool = False
    unplaced: bool = False


@dataclass(slots=True)
class DecisionState:
    """The persisted state of a job's decisions, beside ``JobContext``. No other object of the decisions has state.

    Attributes:
        ports: port of each elastic role's process group.
        recoveries: restarts in progress; a member is in at most one of them.
        ports_asked: nodes whose answers to ``ReservePort`` are expected, by role; only the last answer counts.
        bad_devices: UUIDs of devices that must not be used any more.
        no_room: the failure that ends the job if unplaced members find no room until ``room_until``.
    """

    deadlines: WaitDeadlines
    stop: StopTogether
    ports: dict[str, int] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    ports_asked: dict[str, list[int]] = field(default_factory=dict)
    bad_devices: set[str] = field(default_factory=set)
    no_room: FailureInfo | None = None
    room_until: float = 0.0
    failures: Failures = field(default_factory=Failures)
    health: HealthState = field(default_factory=HealthState)

    @classmethod
    def initial(cls, spec: JobSpec, now: float) -> DecisionState:
        return cls(WaitDeadlines(now + spec.limits.agents_s), StopTogether(spec.grace_s))


@dataclass(slots=True)
class JobState:
    """One job. ``actions`` follow from the current event."""

    context: JobContext
    saved: DecisionState
    last_lines: LastLines
    actions: list[ev.Action] = field(default_factory=list)

    @property
    def spec(self) -> JobSpec:
        return self.context.spec

    @property
    def limits(self) -> TimeLimits:
        return self.context.spec.limits

    @property
    def undecided(self) -> bool:
        """True while no decision was made to end the job early: it still runs, or ends as intended."""
        return self.context.ends_as == "succeeded"

    def living(self) -> list[Member]:
        return [member for member in self.context.members.values() if not member.gone]

    def node_name(self, node_rank: int) -> str:
        node = self.context.nodes.get(node_rank)
        return node.name if node else str(node_rank)

    def do(self, *actions: ev.Action) -> None:
        self.actions.extend(actions)
