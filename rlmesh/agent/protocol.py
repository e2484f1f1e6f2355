"""The messages that master, agents and workers exchange. Plain, frozen, picklable; without behaviour."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rlmesh.errors import CallError, CallRejected, PeerLost
from rlmesh.job.context import Resume
from rlmesh.job.entry_points.entry import EntryKind as EntryKind
from rlmesh.job.entry_points.entry import EntryPoint as EntryPoint
from rlmesh.job.entry_points.program import Program as Program
from rlmesh.job.restarts import RestartEvent
from rlmesh.placement.binding import Binding as Binding
from rlmesh.placement.machine.inventory import Device as Device
from rlmesh.placement.machine.inventory import NodeInfo as NodeInfo

MASTER = "@master"
"""Name under which the master's runtime serves its control object."""
AGENT = "@agent"
"""Name under which an agent's runtime serves its control object."""
CONTROL = "@control"
"""Name under which a worker's runtime serves its control object."""

STATE_REFUSED = 76
"""Exit code of a master that refuses the job's state: a restart would change nothing."""
OUT_OF_MEMORY = 77
"""Exit code of an agent or a master that has no memory to go on."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The configuration of an agent; written as JSON to its standard input, never on a command line.

    ``key_hex`` is the job's secret. ``socket_dir`` has mode 0700; the guardian removes it at the end.
    ``job_path`` is the pickled job, only read if ``start_master`` is set. ``env`` and ``python_flags`` are common to
    all
    workers of the job: the processes that workers are forked from start with them. ``host`` is set if the job has
        several
    machines: the numeric address at which this machine's processes listen for the others.
    ``nvml`` names a library in place of pynvml (``module:attribute``), for machines without GPUs. Agents
    of the same ``group`` are on one machine. ``lease_s`` is how long members may run without contact to the master;
    0: without limit, since they cannot be started elsewhere.
    """

    job_id: str
    job_name: str
    key_hex: str
    node_rank: int
    node_name: str
    nnodes: int
    socket_dir: str
    run_dir: str
    master_endpoint: str
    start_master: bool
    job_path: str = ""
    virtual_devices: int | None = None
    preload: tuple[str, ...] = ()
    import_roots: tuple[str, ...] = ()
    python_flags: tuple[str, ...] = ()
    grace_s: float = 5.0
    submitted_at: float = 0.0
    lease_s: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    nvml: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The configuration of a worker process, which makes it one member of a role. Its agent fills in the values that
    depend on the node (key, addresses, socket folder). ``restart``: why it replaces an earlier process; None for
    the first one. ``fused``: further members in the same process; ``env`` is that of all of them.
    ``lease_agents``: nodes of its group and the endpoints of their agents, if it leases devices on several.
    ``cgroup``: folder of its control group, if any, which may use ``memory_limit_bytes`` (0: no limit).
    ``claim``: where a zygote's fork claims the start before it begins."""

    job_id: str
    job_name: str
    key_hex: str
    role: str
    rank: int
    world_size: int
    incarnation: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_name: str
    entry: EntryPoint
    master_endpoint: str
    socket_dir: str
    run_dir: str
    log_path: str
    backend: str
    user_config: bytes = b""
    main_path: str = ""
    program: Program = field(default_factory=Program)
    import_roots: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    grace_s: float = 5.0
    call_timeout_s: float = 1800.0
    restart: RestartEvent | None = None
    host: str = ""
    resume: Resume | None = None
    group: str = ""
    binding: Binding | None = None
    nvml: str = ""
    agent_endpoint: str = ""
    fused: tuple[WorkerSpec, ...] = ()
    lease_agents: tuple[tuple[int, str], ...] = ()
    memory_limit_bytes: int = 0
    cgroup: str = ""
    claim: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """Role, rank and incarnation."""
        return (self.role, self.rank, self.incarnation)

    @property
    def name(self) -> str:
        return f"{self.role}:{self.rank}"

    @property
    def members(self) -> tuple[WorkerSpec, ...]:
        """The specifications of all members of the process, this one first."""
        return (self, *self.fused)


@dataclass(frozen=True, slots=True)
class MemberHello:
    """A worker's first message to the master: its bound endpoint; ``public`` is for processes of other nodes."""

    role: str
    rank: int
    incarnation: int
    pid: int
    endpoint: str
    public: str = ""


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """A member that runs on a node, or whose end its agent has yet to report."""

    role: str
    rank: int
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The master's answer to an agent: seconds, from the agent's request on, for which its members may run. 0: not at
    all, since they are placed elsewhere. A job without leases (one node) ignores the seconds. ``term``: how often the
    master has given the node up so far; the agent refuses starts that were ordered in another term."""

    lease_s: float = 0.0
    term: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A leftover of a node, found or suspected."""

    kind: Literal["process", "shared_memory", "socket", "control_group", "unproven"]
    what: str
    removed: bool


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The result of a node's cleanup.

    The agent's report covers the members, the guardian's (:mod:`rlmesh.agent.node_start`) everything.

    Attributes:
        processes_started: members and service processes; -1 if the agent died before it could report.
        leftovers: processes and files that had to be ended or removed, or could not be. Empty after an orderly end.
        agent_code: exit code of the agent, negative for a signal; None while it runs.
        why: what ended the node, as the guardian saw it.
        cause: why the agent gave up, if it did.
        guarded: False if the guardian was killed, and so could not see to the end of the node.
    """

    node_rank: int
    processes_started: int
    leftovers: tuple[Leftover, ...] = ()
    agent_code: int | None = None
    why: str = ""
    cause: str = ""
    guarded: bool = True

    @property
    def clean(self) -> bool:
        """True if nothing is left."""
        return all(item.removed for item in self.leftovers)


class CallOrigin(NamedTuple):
    """The origin of an exception: if it came out of calls to members, to which, and if one of them was lost."""

    from_call: bool
    blames: tuple[str, ...] = ()
    lost: bool = False


def origin_of(error: BaseException) -> CallOrigin:
    """Find the origin of an exception: it is a `CallError`, was raised because of one (``raise … from``, or in an
    ``except`` block), or is a group that has one."""
    blames: dict[str, None] = {}
    from_call = lost = False
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, CallError):
            from_call = True
            lost = lost or isinstance(found, PeerLost | CallRejected)
            role, rank = found.role, found.rank
            if isinstance(role, str) and isinstance(rank, int) and not role.startswith("@"):
                blames[f"{role}:{rank}"] = None
        left += [found.__cause__, None if found.__suppress_context__ else found.__context__]
        if isinstance(found, BaseExceptionGroup):
            left += found.exceptions
    return CallOrigin(from_call, tuple(blames), lost)


def public_address(host: str) -> str | None:
    """The address at which a process listens for other machines; None if ``host`` is empty: a job on one machine."""
    if not host:
        return None
    from rlmesh.runtime.transport.inet import join_host_port

    return f"tcp://{join_host_port(host, '*')}"


def portable_error(error: Exception) -> Exception:
    """The error itself if every process of the job can unpickle it, else an error with the same name and text."""
    from rlmesh.wire.failure import message_of  # Slow to import, and only needed after errors.

    module = type(error).__module__
    if module == "builtins" or module.partition(".")[0] == "rlmesh":
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever its own __reduce__ may raise
            return named_error(type(error).__name__, message_of(error))
        return error
    return named_error(type(error).__name__, message_of(error))


def named_error(name: str, text: str) -> Exception:
    """An exception whose type has this name, and nothing else of the original type."""
    made: type[Exception] = type(name, (_Named,), {})
    return made(text)


class _Named(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return (named_error, (type(self).__name__, str(self)))
