"""What happens to a job, and what the master does about it: the vocabulary of ``JobManager``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rlmesh.agent.protocol import MemberProcess
from rlmesh.job.context import StopRequest
from rlmesh.job.restarts import RestartEvent
from rlmesh.job.status import Alarm, ExitInfo, MemberProgress, MemberStack, MetricRecord
from rlmesh.master.context import MemberId
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.runtime.connections.address_book import AddressBook

ProcessKey: TypeAlias = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass(frozen=True, slots=True)
class AgentRegistered:
    """``running``: the members that run there already, of an agent that had another master before."""

    node: NodeInfo
    running: tuple[MemberProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class MasterReturned:
    """This master goes on where another one, which died, was; ``number``: how many there have been, with this one."""

    number: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    node_rank: int
    how: str


@dataclass(frozen=True, slots=True)
class PortReserved:
    """A port for the process group of an elastic role, held on the node of its rank 0."""

    role: str
    port: int
    node_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Spawned:
    node_rank: int
    pids: tuple[tuple[str, int, int], ...]
    """Role, rank and pid of each."""


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """An agent did not do what it was asked; ``what`` says what, ``error`` why."""

    node_rank: int
    what: str
    error: str


@dataclass(frozen=True, slots=True)
class MemberBound:
    role: str
    rank: int
    incarnation: int
    pid: int
    endpoint: str
    public: str = ""


@dataclass(frozen=True, slots=True)
class MemberReady:
    """It serves. ``restored``: the version of the weights that it has restored, if it said so."""

    role: str
    rank: int
    incarnation: int
    restored: int | None = None


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The member was told to run; ``has_run`` is False if it only serves."""

    role: str
    rank: int
    incarnation: int
    has_run: bool


@dataclass(frozen=True, slots=True)
class RunFinished:
    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """The member's own code raised.

    Attributes:
        from_call: what it raised came out of a call to another member.
        blames: names of the members whose calls it came from.
        lost: one of those members was lost.
    """

    role: str
    rank: int
    incarnation: int
    error: str
    traceback: str = ""
    from_call: bool = False
    blames: tuple[str, ...] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True)
class MemberExited:
    node_rank: int
    exit: ExitInfo


@dataclass(frozen=True, slots=True)
class Reported:
    record: MetricRecord


@dataclass(frozen=True, slots=True)
class AlarmRaised:
    """A member says that something is wrong; the job goes on."""

    alarm: Alarm


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """A member was asked what it does; ``progress`` None: it did not answer."""

    member: ProcessKey
    progress: MemberProgress | None
    doing: str = ""


@dataclass(frozen=True, slots=True)
class CircleFound:
    """Members wait for each other; the calls that make up the circle are ended."""

    members: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """What the members do, also written to ``path``."""

    stacks: tuple[MemberStack, ...]
    path: str


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """An agent found that a device is bad: an Xid, an ECC error, a device that is gone. ``uuid`` as in the inventory,
    ``what`` for people."""

    node_rank: int
    uuid: str
    what: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """The job must end soon: its ranks stop together at a step, within the time."""

    reason: str
    within_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class StepHeld:
    """A member's step, and it goes on only when it is told where to stop. ``answered`` is False if it did not say."""

    role: str
    rank: int
    incarnation: int
    step: int | None
    answered: bool = True


@dataclass(frozen=True, slots=True)
class StoppedAt:
    """A member stopped at a step, as it was told to."""

    role: str
    rank: int
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class TeardownUnheard:
    """A member cannot take the order to end: it gave no answer, or failed over it."""

    role: str
    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""


Event: TypeAlias = (
    AgentRegistered | MasterReturned | AgentLost | PortReserved | Spawned | ActionFailed | MemberBound | MemberReady
    | RunBegan | RunFinished | MemberFailed | MemberExited | Reported | AlarmRaised | ProgressSeen | StacksTaken
    | DeviceFailed | CircleFound | StopRequested | NoticeGiven | StepHeld | StoppedAt | TeardownUnheard | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReservePort:
    """Hold a port for the process group of an elastic role; ``instead_of`` is no longer needed."""

    role: str
    node_rank: int
    instead_of: int | None = None


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the given members on a node; ``ports`` maps elastic roles to the port of their process group."""

    node_rank: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True)
class PublishBook:
    """Send the address book to every member that is bound. A newer book replaces one not yet sent."""

    book: AddressBook


@dataclass(frozen=True, slots=True)
class BeginRun:
    member: MemberId


@dataclass(frozen=True, slots=True)
class Teardown:
    """``stop``: the job was stopped before its end, so that the member saves what must survive."""

    member: MemberId
    stop: StopRequest | None = None


@dataclass(frozen=True, slots=True)
class HoldSteps:
    """Ask members for their step; from then on they wait at the next boundary."""

    members: tuple[MemberId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SetStop:
    """Tell members at which step to stop."""

    members: tuple[MemberId, ...]
    request: StopRequest


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Tell members why they end; ``ends``: before ``StopMembers`` ends them."""

    members: tuple[MemberId, ...]
    reason: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class AnnounceLoss:
    """Tell all living members that one is dead, so that calls to it fail at once."""

    exit: ExitInfo


@dataclass(frozen=True, slots=True)
class StopMembers:
    node_rank: int
    members: tuple[MemberId, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class EndProcesses:
    """End the processes of older incarnations; without grace by SIGKILL."""

    node_rank: int
    processes: tuple[ProcessKey, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class TellRestart:
    """Tell all living members that others are replaced, or have been."""

    event: RestartEvent


@dataclass(frozen=True, slots=True)
class AskProgress:
    """Ask members what they do; who does not answer within ``wait_s`` seconds does not answer."""

    members: tuple[ProcessKey, ...]
    wait_s: float


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Write down what all threads of these members do."""

    members: tuple[ProcessKey, ...]


@dataclass(frozen=True, slots=True)
class ForgetNode:
    """Nothing runs on a node any more: what was to be done there is dropped."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class CheckMembers:
    """Ask an agent whether members run that it did not name: those that do not are gone."""

    node_rank: int
    members: tuple[MemberProcess, ...]


Action: TypeAlias = (
    ReservePort | Spawn | PublishBook | BeginRun | Teardown | HoldSteps | SetStop | AskToStop | AnnounceLoss
    | StopMembers | EndProcesses | TellRestart | AskProgress | TakeStacks | CheckMembers | ForgetNode
)  # fmt: skip
