"""A job's specification for the master: plain values, without pydantic and without the user's own classes.

The driver makes it from a ``JobDescription`` and writes it to the job file; the master reads it. ``user_config``
stays pickled up to the workers, since only they can import the classes in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmesh.job.context import Resume
from rlmesh.job.description.time_limits import TimeLimits as TimeLimits
from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.job.entry_points.program import Program
from rlmesh.job.restarts import Scope
from rlmesh.placement.demand import JobDemand

TRAINER = "TRAINER"
"""The role that drives a job unless the job names another."""

MASTER_PID = "master_pid"
AGENT_PIDS = "agent_pids"
MASTER_PUBLIC = "master_public"
"""Keys of ``JobStatus.extra`` for processes on the driver's machine, and for the master's address for other nodes
(empty in a job of one machine)."""
MASTERS = "masters"
"""Key of ``JobStatus.extra``: number of masters that the job has had."""
WANTED_NODES = "wanted_nodes"
"""Key of ``JobStatus.extra``: ranks of lost nodes that need a replacement machine; absent if there are none."""
STORE_TROUBLE = "store_trouble"
"""Key of ``JobStatus.extra``: why the job's state is not being saved; absent if it is."""
REJECTED = "rejected"
"""Key of ``JobStatus.extra``: number of rejected connections at the job's sockets; absent if there were none."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """The restart rule of a role; see :class:`rlmesh.job.description.restart_policy.RestartPolicy`.

    ``of_job``: maximum number of restarts in the job's whole life, counted over all roles for which it is set; None:
    no such limit.
    """

    scope: Scope = "never"
    max_restarts: int = 3
    window_s: float = 600.0
    delay_s: float = 1.0
    max_delay_s: float = 60.0
    on_error: bool = False
    of_job: int | None = None


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """Options of observation and of planned kills.

    Attributes:
        chaos: kills, as texts (``rlmesh.master.chaos_plan``).
        metrics: address for Prometheus: ``HOST:PORT`` or ``unix:PATH``; empty: none.
        timeline: record single calls, for ``rlmesh timeline``.
    """

    chaos: tuple[str, ...] = ()
    metrics: str = ""
    timeline: bool = False


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role.

    Attributes:
        driver: True: the job lasts until ``run()`` of all such roles has returned; False: the job does not wait for
            this role's ``run()``; None: not declared (see `JobSpec.drivers`).
        mesh: sizes of the role's axes, slowest first.
        calls: roles that this role is declared to call.
    """

    name: str
    entry: EntryPoint
    backend: str
    members: int
    env: Mapping[str, str] = field(default_factory=dict)
    driver: bool | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    restart: RestartRule = RestartRule()
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The specification of a job. Times are seconds since the epoch."""

    job_id: str
    job_name: str
    run_dir: str
    roles: tuple[RoleSpec, ...]
    demand: JobDemand
    nnodes: int = 1
    user_config: bytes = b""
    main_path: str = ""
    program: Program = field(default_factory=Program)
    import_roots: tuple[str, ...] = ()
    call_timeout_s: float = 1800.0
    grace_s: float = 5.0
    limits: TimeLimits = field(default_factory=TimeLimits)
    submitted_at: float = 0.0
    resume: Resume | None = None
    observe: ObserveOptions = ObserveOptions()
    serves: bool = False
    """The caller drives the job: without a role that has ``run()`` the job lives until it is stopped."""

    def role(self, name: str) -> RoleSpec:
        return next(role for role in self.roles if role.name == name)

    def drivers(self) -> tuple[str, ...] | None:
        """Return the roles named as drivers, else TRAINER if the job has it; None: all roles that have ``run()``."""
        named = tuple(role.name for role in self.roles if role.driver)
        if named:
            return named
        trainer = [role for role in self.roles if role.name == TRAINER and role.driver is None]
        return (TRAINER,) if trainer else None
