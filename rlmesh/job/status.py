"""What a running job looks like from outside: plain, frozen, picklable values."""

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
"""How the part of a process's stacks that is about its main thread begins: as it tells them itself, and as
``faulthandler`` does, whose signals come to that thread."""
NODE_LOST = "NodeLost"
"""The ``kind`` of a failure whose first cause is a node that was lost."""

MemberState = Literal["starting", "bound", "ready", "running", "finished", "restarting", "stopping", "exited", "failed"]
"""starting: spawned; bound: its endpoint is known; ready: ``setup()`` returned and its methods can be called;
running: inside ``run()``; finished: ``run()`` returned; restarting: its process is gone and the next one not started
yet; stopping: ``teardown()``; exited: code 0; failed: the rest."""

Stage = Literal["starting", "running", "stopping", "succeeded", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One ``current_worker().report(step=…, **metrics)``.

    ``sender`` and ``number`` tell reports apart, also those of different incarnations of a member; the master fills
    them in.
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
    """One ``current_worker().alarm(text)``; ``step`` is the member's last one, if it said one."""

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
    """How a worker process ended, as its agent saw it. ``served``: calls may have begun there. ``oom``: the kernel
    ended it for want of memory, and how much it had. ``why``: rlmesh ended it, and for what reason. ``noted`` and
    ``noted_traceback``: the exception that it noted before its end, by ``@record`` of ``torch.distributed.elastic``."""

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
        """For example ``killed by SIGKILL`` or ``exited with code 3``."""
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
    """One member. ``fused_with``: the member of another role in whose process it lives. ``doing``: what it does that
    its state does not say, such as ``busy in A:0.hold() for 7 s, does not answer``."""

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
    """Whom one member waits for, and what it was asked and has not answered. ``error`` says why it could not be
    asked; ``process`` is what its process does, ``doing`` what keeps it from answering."""

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
    """What one member does, in its own words.

    Attributes:
        run_s: how long ``run()`` has been running; None: it is not.
        calls: the calls that run there.
        quiet_s: since it reported, passed a step's boundary, sent a call, got an answer or sent an item of a stream.
        waits: whose answers it waits for, by name.
    """

    run_s: float | None = None
    calls: tuple[Serving, ...] = ()
    quiet_s: float = 0.0
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberStack:
    """What the threads of one member do.

    Attributes:
        state: of its process, as the kernel sees it: ``runs``, ``sleeps``, ``is stopped``, …
        wchan: where in the kernel it waits, if the kernel says so.
        cpu_s: processor time that it has used in all.
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
    """The first cause of a job's failure, and what followed, oldest first. ``kind`` names the error that it is raised
    as, where message and exit do not tell."""

    message: str
    role: str | None = None
    rank: int | None = None
    at: float = 0.0
    exit: ExitInfo | None = None
    remote_traceback: str = ""
    kind: str = ""
    touched: str = ""
    """Who calls the member, and whom it calls: upstream and downstream of the failure."""


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """One restart in the history of a job.

    Attributes:
        unit: what the budget is counted for: ``ROLE:rank``, a role, or ``job``.
        failure: the reason.
        at: when, in seconds since the epoch.
        delay_s: how long the new processes were held back.
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
    """A snapshot of a job. ``records`` are the metric records from number ``records_from`` on; ``restarts`` are all so
    far, oldest first, and ``incidents`` the files that tell of failures. ``resumable``: it had notice that it must
    end; ``stopped_at`` is then the step after which all ranks stopped, if they did. ``killed`` names the members whose
    grace was not enough, or was cut short. ``samples_trained`` is the count that was reported last, 0 if none was.
    ``alarms``: the last ones that members raised, of ``alarm_count``. ``at``: when it was made, by the clock of all
    times in it."""

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
    """What one member called of another, up to ``at`` (seconds since the epoch)."""

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
        """As texts and numbers."""
        return {"caller": self.caller, "at": self.at, **asdict(self.stats)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> GraphEdge:
        """The edge that ``plain`` was made of."""
        values = dict(plain)
        caller, at = values.pop("caller"), values.pop("at")
        return cls(caller, EdgeStats(**values), at)


def first_cause(job_name: str, failures: Sequence[FailureInfo]) -> str:
    """That a job failed, and by what, in one line."""
    first = failures[0].message.splitlines()[:1] if failures else []
    return f"job {job_name} failed: {first[0] if first else 'no cause was recorded'}"
