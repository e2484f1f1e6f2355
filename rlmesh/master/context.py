"""The job as the master knows it: members, incarnations, stage, failures, records.

Each change is saved (``rlmesh.master.state.snapshot``). Fields of ``Member`` hold values that are replaced, not changed
in place, so that a change can be detected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite, nan

from rlmesh.job.restarts import RestartEvent
from rlmesh.job.status import (
    Alarm,
    ExitInfo,
    FailureInfo,
    JobStatus,
    MemberState,
    MemberStatus,
    MetricRecord,
    RestartRecord,
    Stage,
)
from rlmesh.master.jobspec import JobSpec
from rlmesh.master.monitoring.graph import CallGraph
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.placement.node_groups import node_groups
from rlmesh.placement.planner import Placement, Plan
from rlmesh.runtime.axes import Axes
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.process.clock import epoch

SAMPLES_TRAINED = "samples_trained"
"""The metric that is part of the job's state."""
MOST_RECORDS = 100_000
"""Maximum number of metric records held for status(); ``metrics.jsonl`` has all of them."""

MOST_ALARMS = 20

MemberId = tuple[str, int]
"""Role and rank."""


@dataclass(slots=True)
class Member:
    """One member of a role, in its current incarnation. Times are those of the job (``JobContext.shown``).

    Attributes:
        has_finished: ``run()`` returned; a new incarnation of this member alone does not run it again.
        hidden: the address book does not have the member's address before the member serves.
        restart: why this incarnation exists; None for the first one.
    """

    placement: Placement
    log_path: str
    state: MemberState = "starting"
    incarnation: int = 0
    pid: int = 0
    endpoint: str = ""
    public: str = ""
    since: float = 0.0
    step: int | None = None
    last_beat_at: float | None = None
    has_run: bool | None = None
    in_run: bool = False
    has_finished: bool = False
    hidden: bool = False
    restart: RestartEvent | None = None
    spawned: bool = False
    asked_to_end: bool = False
    ended_by_us: bool = False
    exit: ExitInfo | None = None

    @property
    def id(self) -> MemberId:
        return (self.placement.role, self.placement.rank)

    @property
    def key(self) -> tuple[str, int, int]:
        """Role, rank and incarnation: identifies the process."""
        return (*self.id, self.incarnation)

    @property
    def name(self) -> str:
        return f"{self.placement.role}:{self.placement.rank}"

    @property
    def host(self) -> MemberId:
        """The member whose process this member runs in: itself, unless roles are fused."""
        return self.placement.process or self.id

    @property
    def gone(self) -> bool:
        """True if no process of the member can be left."""
        return self.exit is not None or not self.spawned

    def enter(self, state: MemberState, now: float) -> None:
        self.state, self.since, self.last_beat_at = state, now, now

    def next_incarnation(self, *, hidden: bool, now: float) -> None:
        """Switch to the incarnation that will replace the current process."""
        self.incarnation += 1
        self.pid, self.endpoint, self.public, self.exit = 0, "", "", None
        self.spawned = self.asked_to_end = self.ended_by_us = self.in_run = False
        self.hidden = hidden
        self.enter("restarting", now)


@dataclass(slots=True)
class JobContext:
    """The state of a job; changed by ``JobManager`` only."""

    spec: JobSpec
    started_at: float
    stage: Stage = "starting"
    nodes: dict[int, NodeInfo] = field(default_factory=dict)
    lost_nodes: dict[int, str] = field(default_factory=dict)
    """Nodes that were given up and have not returned, with how they were lost."""
    set_aside: dict[int, int] = field(default_factory=dict)
    """Nodes that are not used because another node of their group is lost, with that node."""
    terms: dict[int, int] = field(default_factory=dict)
    """Number of times that each node was given up. An agent starts nothing that was ordered in an earlier term."""
    plan: Plan | None = None
    members: dict[MemberId, Member] = field(default_factory=dict)
    failures: list[FailureInfo] = field(default_factory=list)
    restarts: list[RestartRecord] = field(default_factory=list)
    records: list[MetricRecord] = field(default_factory=list)
    records_dropped: int = 0
    master_public: str = ""
    """Address of the master for other nodes; the next master must listen there too."""
    records_before: int = 0
    """Lines of ``metrics.jsonl`` left by an earlier job in the same run directory."""
    book_version: int = 0
    first_serving_s: float | None = None
    all_serving_s: float | None = None
    note: str = ""
    ends_as: Stage = "succeeded"
    graph: CallGraph = field(default_factory=CallGraph)
    resumable: bool = False
    stopped_at: int | None = None
    samples_trained: int = 0
    """Last reported number of trained samples, in this start of the job or an earlier one."""
    killed: list[str] = field(default_factory=list)
    stop_grace_s: float = 0.0
    incidents: list[str] = field(default_factory=list)
    """Paths of the readable incident files."""
    alarms: tuple[Alarm, ...] = ()
    """The last alarms."""
    alarm_count: int = 0
    standstills: tuple[tuple[float, float], ...] = ()
    """Suspensions of the master: when, in the job's time, and for how many seconds."""

    @classmethod
    def initial(cls, spec: JobSpec, now: float) -> JobContext:
        """Return the context of a job that starts now."""
        return cls(spec, now, samples_trained=spec.resume.samples_trained if spec.resume else 0)

    def shown(self, at: float) -> float:
        """Convert the job's time, which leaves out suspensions of the master, to seconds since the epoch."""
        return at + sum(seconds for began, seconds in self.standstills if began < at)

    def shown_failure(self, failure: FailureInfo) -> FailureInfo:
        """Return a failure with its time as seconds since the epoch."""
        return replace(failure, at=self.shown(failure.at)) if self.standstills else failure

    def shown_restart(self, record: RestartRecord) -> RestartRecord:
        """Return a restart with its times as seconds since the epoch."""
        if not self.standstills:
            return record
        ready_at = None if record.ready_at is None else self.shown(record.ready_at)
        return replace(
            record, at=self.shown(record.at), ready_at=ready_at, failure=self.shown_failure(record.failure)
        )  # fmt: skip

    def sharing_process(self, member: Member) -> list[Member]:
        """Return the members that share a process with a member, including itself."""
        if member.placement.process is None:
            return [member]
        return [other for other in self.members.values() if other.host == member.host]

    def add_record(self, record: MetricRecord) -> None:
        if isfinite(count := record.metrics.get(SAMPLES_TRAINED, nan)):
            self.samples_trained = int(count)
        self.records.append(record)
        if len(self.records) > MOST_RECORDS:
            dropped = MOST_RECORDS // 10
            del self.records[:dropped]
            self.records_dropped += dropped

    def add_alarm(self, alarm: Alarm) -> None:
        self.alarms = (*self.alarms, alarm)[-MOST_ALARMS:]
        self.alarm_count += 1

    def new_book(self) -> AddressBook:
        """Return the addresses of all members under a new version."""
        self.book_version += 1
        return AddressBook(
            self.book_version,
            tuple(
                MemberAddress(
                    role=member.placement.role,
                    rank=member.placement.rank,
                    incarnation=member.incarnation,
                    endpoint=None if member.hidden else member.endpoint or None,
                    node_rank=member.placement.node_rank,
                    pid=member.pid,
                    public="" if member.hidden else member.public,
                    group=member.placement.group,
                )
                for member in self.members.values()
            ),
            tuple((role.name, Axes.of(role.mesh)) for role in self.spec.roles if role.mesh),
            tuple(node_groups(self.nodes.values())),
            tuple(role.name for role in self.spec.roles if role.backend == "elastic"),
        )

    def status(self, records_from: int = 0) -> JobStatus:
        """Return a snapshot, with the records from number ``records_from`` on as far as they are held."""
        start = max(records_from, self.records_dropped)
        return JobStatus(
            job_name=self.spec.job_name,
            job_id=self.spec.job_id,
            stage=self.stage,
            started_at=self.spec.submitted_at or self.started_at,
            at=epoch(),
            run_dir=self.spec.run_dir,
            members=tuple(self._member_status(member) for member in self.members.values()),
            records=tuple(self.records[start - self.records_dropped :]),
            records_from=start,
            failures=tuple(map(self.shown_failure, self.failures)),
            first_serving_s=self.first_serving_s,
            all_serving_s=self.all_serving_s,
            note=self.note,
            restarts=tuple(map(self.shown_restart, self.restarts)),
            resumable=self.resumable,
            stopped_at=self.stopped_at,
            killed=f"SIGKILL after {self.stop_grace_s:g} s: {', '.join(self.killed)}" if self.killed else "",
            incidents=tuple(self.incidents),
            samples_trained=self.samples_trained,
            alarms=self.alarms,
            alarm_count=self.alarm_count,
        )

    def _member_status(self, member: Member) -> MemberStatus:
        return MemberStatus(
            role=member.placement.role,
            rank=member.placement.rank,
            incarnation=member.incarnation,
            node_rank=member.placement.node_rank,
            pid=member.pid,
            state=member.state,
            step=member.step,
            last_beat_at=None if member.last_beat_at is None else self.shown(member.last_beat_at),
            log_path=member.log_path,
            endpoint=member.endpoint,
            fused_with="" if member.host == member.id else "{}:{}".format(*member.host),
        )
