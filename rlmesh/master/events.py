"""Events of a job and actions of the master: the input and output of ``JobManager``."""

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
    """An agent registered. ``running``: members that run on its node already, started under a previous master."""

    node: NodeInfo
    running: tuple[MemberProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class MasterReturned:
    """This master continues the job of one that died. ``number``: masters of the job so far, including this one."""

    number: int


@dataclass(frozen=True, slots=True)
class AgentLost:
    node_rank: int
    how: str


@dataclass(frozen=True, slots=True)
class PortReserved:
    """A port for the process group of an elastic role is reserved on the node of its rank 0."""

    role: str
    port: int
    node_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Spawned:
    node_rank: int
    pids: tuple[tuple[str, int, int], ...]
    """Role, rank and pid of each process."""


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """An agent failed to carry out an action. ``what``: the action, ``error``: the reason."""

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
    """A member serves. ``restored``: version of the weights that it has restored, if it reported one."""

    role: str
    rank: int
    incarnation: int
    restored: int | None = None


@dataclass(frozen=True, slots=True)
class RunBegan:
    """A member was told to run; ``has_run`` is False if it only serves."""

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
    """A member's own code raised.

    Attributes:
        from_call: the exception came out of a call to another member.
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
    """A member reports that something is wrong; the job goes on."""

    alarm: Alarm


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """A member answered what it is doing; ``progress`` is None if it did not answer."""

    member: ProcessKey
    progress: MemberProgress | None
    doing: str = ""


@dataclass(frozen=True, slots=True)
class CircleFound:
    """Members wait for each other in a circle; the calls of the circle are ended."""

    members: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """Stacks of members were taken and written to ``path``."""

    stacks: tuple[MemberStack, ...]
    path: str


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """An agent found a bad device: an Xid, an ECC error, or a missing device. ``uuid`` as in the inventory; ``what``
    is a description."""

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
    """A member holds at its step until it is told where to stop. ``answered`` is False if it did not answer."""

    role: str
    rank: int
    incarnation: int
    step: int | None
    answered: bool = True


@dataclass(frozen=True, slots=True)
class StoppedAt:
    """A member stopped at a step as requested."""

    role: str
    rank: int
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class TeardownUnheard:
    """A member could not take the order to tear down: it did not answer, or raised."""

    role: str
    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are checked."""


Event: TypeAlias = (
    AgentRegistered | MasterReturned | AgentLost | PortReserved | Spawned | ActionFailed | MemberBound | MemberReady
    | RunBegan | RunFinished | MemberFailed | MemberExited | Reported | AlarmRaised | ProgressSeen | StacksTaken
    | DeviceFailed | CircleFound | StopRequested | NoticeGiven | StepHeld | StoppedAt | TeardownUnheard | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReservePort:
    """Reserve a port for the process group of an elastic role; the port ``instead_of`` is released."""

    role: str
    node_rank: int
    instead_of: int | None = None


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start members on a node."""

    node_rank: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True)
class PublishBook:
    """Send the address book to every bound member. A newer book replaces one that is not sent yet."""

    book: AddressBook


@dataclass(frozen=True, slots=True)
class BeginRun:
    member: MemberId


@dataclass(frozen=True, slots=True)
class Teardown:
    """Tell a member to tear down. ``stop``: the job was stopped before its end, so the member saves what must
    survive."""

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
    """Tell members why they end. ``ends``: ``StopMembers`` follows and ends them."""

    members: tuple[MemberId, ...]
    reason: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class AnnounceLoss:
    """Tell all living members that a member is dead, so that calls to it fail at once."""

    exit: ExitInfo


@dataclass(frozen=True, slots=True)
class StopMembers:
    node_rank: int
    members: tuple[MemberId, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class EndProcesses:
    """End processes of older incarnations; without grace, by SIGKILL."""

    node_rank: int
    processes: tuple[ProcessKey, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class TellRestart:
    """Tell all living members that others are being replaced, or have been."""

    event: RestartEvent


@dataclass(frozen=True, slots=True)
class AskProgress:
    """Ask members what they are doing; a member has ``wait_s`` seconds to answer."""

    members: tuple[ProcessKey, ...]
    wait_s: float


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Write down the stacks of all threads of these members."""

    members: tuple[ProcessKey, ...]


@dataclass(frozen=True, slots=True)
class ForgetNode:
    """Drop the orders for a node on which nothing runs any more."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class CheckMembers:
    """Ask an agent whether members run that were missing when it registered; those that do not run have exited."""

    node_rank: int
    members: tuple[MemberProcess, ...]


Action: TypeAlias = (
    ReservePort | Spawn | PublishBook | BeginRun | Teardown | HoldSteps | SetStop | AskToStop | AnnounceLoss
    | StopMembers | EndProcesses | TellRestart | AskProgress | TakeStacks | CheckMembers | ForgetNode
)  # fmt: skip
