"""The status of a running job: plain, frozen, picklable values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlmesh.job.restarts import Scope
from rlmesh.runtime.calling.call_stats import CallStats as CallStats
from rlmesh.runtime.calling.call_stats import EdgeStats as EdgeStats
from rlmesh.runtime.calling.peer_status import Serving as Serving
from rlmesh.runtime.calling.peer_status import Waiting as Waiting

SHOWN_FRAMES = 5
MAIN_THREAD = ("Main thread", "Current thread")
"""First words of the main thread's part of a process's stacks: in its own answer, and from ``faulthandler``, whose
signal handlers run on that thread."""
NODE_LOST = "NodeLost"
"""The ``kind`` of a failure whose first cause is a lost node."""

MemberState = Literal["starting", "bound", "ready", "running", "finished", "restarting", "stopping", "exited", "failed"]
"""starting: spawned; bound: its endpoint is known; ready: ``setup()`` returned and its methods can be called;
running: inside ``run()``; finished: ``run()`` returned; restarting: its process is gone and the next one is not
started yet; stopping: ``teardown()``; exited: code 0; failed: all other ends."""

SERVING: frozenset[MemberState] = frozenset({"ready", "running", "finished"})
"""States in which a member serves calls."""

Stage = Literal["starting", "running", "stopping", "succeeded", "failed", "stopped"]
ENDED: frozenset[Stage] = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One ``current_worker().report(step=…, **metrics)``.

    ``sender`` and ``number`` identify a report, also across incarnations of a member; the master fills them in.
    """

    at: float
    role: str
    rank: int
    step: int
    metrics: Mapping[str, float]
    calls: tuple[CallStats, ...] = ()
    sender: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Alarm:
    """One ``current_worker().alarm(text)``; ``step`` is the member's last reported step, if any."""

    at: float
    role: str
    rank: int
    step: int | None
    text: str

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.role}:{self.rank}{step}: {self.text}"


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """The end of a worker process, as its agent saw it.

    Attributes:
        served: calls may have begun in the process.
        oom: the kernel ended it for lack of memory; the text has its memory use.
        why: rlmesh ended it, for this reason.
        noted, noted_traceback: the exception that ``@record`` of ``torch.distributed.elastic`` wrote before the end.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    exit_code: int | None
    signal: int | None
    at: float
    node_rank: int = 0
    hostname: str = ""
    log_path: str = ""
    last_log_lines: tuple[str, ...] = ()
    peak_rss_bytes: int = 0
    served: bool = True
    oom: str = ""
    noted: str = ""
    noted_traceback: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def describe(self) -> str:
        """Return for example ``killed by SIGKILL`` or ``exited with code 3``."""
        if self.signal is not None:
            import signal as signals

            try:
                name = signals.Signals(self.signal).name
            except ValueError:
                name = f"signal {self.signal}"
            if self.why:
                return f"was ended by {name}: {self.why}"
            return f"killed by {name}" + (f" ({self.oom})" if self.oom else "")
        if self.exit_code is None:
            return "ended unseen"
        return f"exited with code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member.

    Attributes:
        fused_with: the member of another role whose process it shares.
        doing: an activity that the state does not show, such as ``busy in A:0.hold() for 7 s, does not answer``.
    """

    role: str
    rank: int
    incarnation: int
    node_rank: int
    pid: int
    state: MemberState
    step: int | None = None
    last_beat_at: float | None = None
    log_path: str = ""
    endpoint: str = ""
    fused_with: str = ""
    doing: str = ""


@dataclass(frozen=True, slots=True)
class MemberWaits:
    """The calls that one member waits for, and those that it has not answered.

    Attributes:
        process: state of its process.
        error: why it could not be asked.
        doing: the activity that keeps it from answering.
    """

    role: str
    rank: int
    pid: int
    state: MemberState
    step: int | None
    waits: tuple[Waiting, ...] = ()
    serves: tuple[Serving, ...] = ()
    process: str = ""
    error: str = ""
    doing: str = ""


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """The progress of one member, as reported by itself.

    Attributes:
        run_s: seconds since ``run()`` began; None: it is not running.
        calls: the calls that run in the member.
        quiet_s: seconds since it reported, passed a step boundary, sent a call, got an answer or sent an item of a
            stream.
        waits: names of the members whose answers it waits for.
    """

    run_s: float | None = None
    calls: tuple[Serving, ...] = ()
    quiet_s: float = 0.0
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberStack:
    """The stacks of one member's threads.

    Attributes:
        state: state of its process, as the kernel sees it: ``runs``, ``sleeps``, ``is stopped``, …
        wchan: where in the kernel it waits, if the kernel says so.
        cpu_s: total processor time in seconds.
        text: the Python stacks of all threads, innermost call first; empty if it did not answer.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    state: str
    wchan: str = ""
    cpu_s: float = 0.0
    text: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.role, self.rank, self.incarnation

    @property
    def name(self) -> str:
        return f"{self.role}:{self.rank}"

    @property
    def frames(self) -> tuple[str, ...]:
        """The innermost calls of the main thread, as ``file:line in function``."""
        found: list[str] = []
        inside = False
        for line in self.text.splitlines():
            if line.startswith((*MAIN_THREAD, "Thread")):
                inside = line.startswith(MAIN_THREAD)
            elif inside and line.lstrip().startswith("File "):
                file, _, rest = line.strip().removeprefix('File "').partition('", line ')
                number, _, function = rest.partition(" in ")
                found.append(f"{file}:{number} in {function}")
        return tuple(found[:SHOWN_FRAMES])


@dataclass(frozen=True, slots=True)
class FailureInfo:
    """One failure of a job. ``kind`` names the class of its error, if message and exit do not determine it."""

    message: str
    role: str | None = None
    rank: int | None = None
    at: float = 0.0
    exit: ExitInfo | None = None
    remote_traceback: str = ""
    kind: str = ""
    touched: str = ""
    """Callers and callees of the member: upstream and downstream of the failure."""


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """One restart in the history of a job.

    Attributes:
        unit: the unit of the budget: ``ROLE:rank``, a role, or ``job``.
        failure: the reason.
        at: when, in seconds since the epoch.
        delay_s: delay of the new processes.
        ready_at: when all of them served again; None: not yet.
    """

    unit: str
    scope: Scope
    failure: FailureInfo
    at: float
    delay_s: float
    ready_at: float | None = None

    @property
    def cause(self) -> str:
        """The reason in one line."""
        return self.failure.message.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of a job.

    Attributes:
        records: metric records from number ``records_from`` on.
        restarts: all restarts so far, oldest first.
        incidents: paths of the incident files.
        resumable: the job had a notice that it must end.
        stopped_at: the step after which all ranks stopped after the notice, if they did.
        killed: the members whose grace was too short, or was cut short.
        samples_trained: the last reported count, 0 without one.
        alarms: the last alarms, of ``alarm_count`` in total.
        at: when the snapshot was made. All times in the snapshot are by the same clock.
    """

    job_name: str
    job_id: str
    stage: Stage
    started_at: float
    run_dir: str
    members: tuple[MemberStatus, ...] = ()
    records: tuple[MetricRecord, ...] = ()
    records_from: int = 0
    failures: tuple[FailureInfo, ...] = ()
    first_serving_s: float | None = None
    all_serving_s: float | None = None
    note: str = ""
    resumable: bool = False
    stopped_at: int | None = None
    killed: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    restarts: tuple[RestartRecord, ...] = ()
    incidents: tuple[str, ...] = ()
    samples_trained: int = 0
    alarms: tuple[Alarm, ...] = ()
    alarm_count: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """The calls of one member to another, up to ``at`` (seconds since the epoch)."""

    caller: str
    stats: EdgeStats
    at: float

    @property
    def callee(self) -> str:
        return self.stats.callee

    @property
    def method(self) -> str:
        return self.stats.method

    def plain(self) -> dict[str, Any]:
        """Return the edge as texts and numbers."""
        return {"caller": self.caller, "at": self.at, **asdict(self.stats)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> GraphEdge:
        """Return the edge of the values that ``plain`` made."""
        values = dict(plain)
        caller, at = values.pop("caller"), values.pop("at")
        return cls(caller, EdgeStats(**values), at)


def first_cause(job_name: str, failures: Sequence[FailureInfo]) -> str:
    """Return a line that names the job and its first cause."""
    first = failures[0].message.splitlines()[:1] if failures else []
    return f"job {job_name} failed: {first[0] if first else 'no cause was recorded'}"
