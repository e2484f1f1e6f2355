"""The values that master, agents and workers exchange. Plain, frozen, picklable; no behaviour of their own."""

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
"""Name under which the master's endpoint serves its control object."""
AGENT = "@agent"
"""Name under which an agent's endpoint serves its control object."""
CONTROL = "@control"
"""Name under which a worker's endpoint serves its control object."""

STATE_REFUSED = 76
"""Exit code of a master that does not trust the job's state: starting it again would change nothing."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All that an agent needs; written as JSON to its standard input, never on a command line.

    ``key_hex`` is the job's secret. ``socket_dir`` has mode 0700 and is removed by the guardian at the end.
    ``job_path`` is the pickled job, only read where ``start_master`` is set. ``env`` is what all workers of the job
    have in common: the processes that workers are forked from start with it, and with ``python_flags``. ``host`` is
    set where the job has several machines: the numeric address at which this one's processes listen for the
    others'. ``nvml`` names a library in place of pynvml (``module:attribute``), for machines without GPUs. Agents
    of the same ``group`` are on one machine. ``lease_s`` is how long members may run without word from the master;
    0: for ever, since they cannot be started elsewhere.
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
    """All that a worker process needs to become one member of a role. What depends on the node (key, addresses,
    folder of sockets) is filled in by its agent. ``restart``: why it takes the place of an earlier process; None for
    the first one. ``fused``: further members that live in the same process; ``env`` is that of all of them.
    ``lease_agents``: nodes of its group and where their agents listen, if it leases devices on several.
    ``cgroup``: folder of its control group, if it has one, which may use ``memory_limit_bytes`` (0: any)."""

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

    @property
    def key(self) -> tuple[str, int, int]:
        """Role, rank and incarnation."""
        return (self.role, self.rank, self.incarnation)

    @property
    def name(self) -> str:
        return f"{self.role}:{self.rank}"

    @property
    def members(self) -> tuple[WorkerSpec, ...]:
        """Itself, and those that live in its process."""
        return (self, *self.fused)


@dataclass(frozen=True, slots=True)
class MemberHello:
    """A worker's first message to the master: its endpoint is bound; ``public`` is for processes of other nodes."""

    role: str
    rank: int
    incarnation: int
    pid: int
    endpoint: str
    public: str = ""


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """A member that runs on a node, or whose end its agent has yet to tell."""

    role: str
    rank: int
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The master's answer to an agent: for how many seconds, from when it asked, its members may run. 0: not at all,
    for they are placed elsewhere; with an endless lease, where there is no elsewhere, it means nothing. ``term``: how
    often the node was given up before; what was ordered in an earlier term is not to be started any more."""

    lease_s: float = 0.0
    term: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that was, or may have been, left behind by a node."""

    kind: Literal["process", "shared_memory", "socket", "control_group", "unproven"]
    what: str
    removed: bool


@dataclass(frozen=True, slots=True)
class ExitReport:
    """What was found when a node was made sure to be empty.

    From the agent's ``shutdown`` it covers the members, from the guardian (:mod:`rlmesh.agent.node_start`) all.

    Attributes:
        processes_started: members and what served them; -1 if the agent died before it could say.
        leftovers: what had to be ended or removed, or could not be. Empty after an orderly end.
        agent_code: exit code of the agent, negative for a signal; None while it runs.
        why: what ended the node, as the guardian saw it.
        cause: why the agent gave up, if it did.
    """

    node_rank: int
    processes_started: int
    leftovers: tuple[Leftover, ...] = ()
    agent_code: int | None = None
    why: str = ""
    cause: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing is left."""
        return all(item.removed for item in self.leftovers)


class CallOrigin(NamedTuple):
    """Whether an exception came out of calls to other members, whose they were, and whether one of them was lost."""

    from_call: bool
    blames: tuple[str, ...] = ()
    lost: bool = False


def origin_of(error: BaseException) -> CallOrigin:
    """Where an exception came from: it is a `CallError`, or was raised because of one (``raise … from``, or in an
    ``except`` block), or is a group that holds one."""
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
    """Where a process listens for those of other machines; None in a job on one machine, whose ``host`` is empty."""
    if not host:
        return None
    from rlmesh.runtime.transport.inet import join_host_port

    return f"tcp://{join_host_port(host, '*')}"


def portable_error(error: Exception) -> Exception:
    """The error itself if every process of the job can unpickle it, else one of the same name and text."""
    from rlmesh.wire.failure import message_of  # Slow to import, and only needed by what fails.

    module = type(error).__module__
    if module == "builtins" or module.partition(".")[0] == "rlmesh":
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever its own __reduce__ may raise
            return named_error(type(error).__name__, message_of(error))
        return error
    return named_error(type(error).__name__, message_of(error))


def named_error(name: str, text: str) -> Exception:
    """An exception whose type has this name, and nothing else of the type that it stands for."""
    made: type[Exception] = type(name, (_Named,), {})
    return made(text)


class _Named(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return (named_error, (type(self).__name__, str(self)))
