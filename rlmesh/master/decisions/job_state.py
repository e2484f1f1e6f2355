"""State that all decision modules share: the job's context, the persisted decisions, and the actions to carry out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlmesh.job.status import FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member, MemberId
from rlmesh.master.decisions.deadlines import WaitDeadlines
from rlmesh.master.decisions.failover import Restart
from rlmesh.master.decisions.root_cause import Failures
from rlmesh.master.decisions.stop_together import StopTogether
from rlmesh.master.jobspec import JobSpec, TimeLimits
from rlmesh.master.monitoring.diagnosis import HealthState

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
