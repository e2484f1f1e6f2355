"""The errors that rlmesh raises.

::

    RLMeshError
      UsageError                      wrong use, found before anything runs
        JobSpecError                  a job description that cannot work; lists all its faults at once
        RoleNotFound                  no such role in this job
        MethodNotFound                the role exports no such method
        WouldDeadlock                 a wait that could never end
      CallError                       a call failed: role, rank, method, call_id, executed
        RemoteError                   the method raised; also an instance of the original type where possible
        CallTimeout (TimeoutError)    the deadline passed
        PeerLost (ConnectionError)    the called member died
        CallCancelled                 the caller cancelled the call, or its own caller did
        CallRejected                  the member did not start the call
          MailboxFull
          StaleIncarnation
          Restarting
          ShuttingDown
      GroupCallError                  an ExceptionGroup of the members' errors: .failures, .results
      WireError                       bytes that cannot be sent or understood
        VersionMismatch
        MalformedFrame
        Unserializable
        AuthenticationFailed
        PayloadTooLarge
        SlotGone                      shared memory of a message went with the process that sent it
        DeviceUnreachable             a tensor lies on a device that the receiving process cannot reach
      PlacementError                  the cluster cannot hold the job
        LeaseTimeout (TimeoutError)   another role held the devices too long
      LaunchError                     processes could not be started
      PreflightError                  a check before the start failed
      WeightSyncError                 a weight sync was not committed
        WeightsNotReady               a member was asked to serve weights that it does not have
        SourceRestarted               the source of weights is not where the last push left it
      RestartBudgetExhausted          a role failed more often than its policy allows
      JobStopped                      the job was stopped before its end, and can be resumed
      JobFailed                       an ExceptionGroup of the first causes, oldest first

Each class has a stable ``code`` that appears in logs and incident files. Each message says who failed, where, with
what, since when, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

__all__ = [
    "AuthenticationFailed", "CallCancelled", "CallDetails", "CallError", "CallRejected", "CallTimeout",
    "DeviceUnreachable", "Executed", "GroupCallError", "JobFailed", "JobSpecError", "JobStopped", "LaunchError",
    "LeaseTimeout", "MailboxFull", "MalformedFrame", "MethodNotFound", "PayloadTooLarge", "PeerLost", "PlacementError",
    "PreflightError", "RLMeshError", "RemoteError", "RestartBudgetExhausted", "Restarting", "RoleNotFound",
    "ShuttingDown", "SlotGone", "SourceRestarted", "StaleIncarnation", "Unserializable", "UsageError",
    "VersionMismatch", "WeightSyncError", "WeightsNotReady", "WireError", "WouldDeadlock", "import_fault", "is_absent",
]  # fmt: skip

Executed = Literal["no", "maybe", "yes"]
"""The method's body ran (``yes``: never retry), may have run (``maybe``: retry if idempotent), or did not (``no``)."""


class RLMeshError(Exception):
    """Base of all errors of rlmesh."""

    code: ClassVar[str] = "RM000"


class UsageError(RLMeshError):
    """rlmesh was used in a way that cannot work; the message names the right use."""

    code = "RM100"


class JobSpecError(UsageError):
    """A job description has faults; ``problems`` lists all of them, not only the first."""

    code = "RM101"

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        head = (
            "the job description has 1 problem"
            if len(self.problems) == 1
            else (f"the job description has {len(self.problems)} problems")
        )
        super().__init__(head + ":\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.problems,))


class RoleNotFound(UsageError):
    """The job has no role of that name."""

    code = "RM102"


class MethodNotFound(UsageError):
    """The role exports no method of that name."""

    code = "RM103"


class WouldDeadlock(UsageError):
    """The wait could never end: it holds what must run for the answer to come."""

    code = "RM104"


class CallDetails(NamedTuple):
    """The details of a failed call: the attributes of a `CallError` and, where the method raised, of a `RemoteError`.

    `CallError.details` returns them.
    """

    role: str | None = None
    rank: int | None = None
    method: str | None = None
    call_id: int | None = None
    executed: Executed = "maybe"
    remote_type: str = ""
    remote_message: str = ""
    remote_traceback: str = ""
    remote_causes: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0


class CallError(RLMeshError):
    """A remote call failed.

    Attributes:
        role, rank: the called member (``None`` if none was chosen yet).
        method: name of the remote method.
        call_id: identifies the call in logs on both sides.
        executed: ``yes``, ``maybe`` or ``no``: the method's body ran, may have run, or did not run.
    """

    code = "RM200"

    def __init__(
        self,
        message: str,
        *,
        role: str | None = None,
        rank: int | None = None,
        method: str | None = None,
        call_id: int | None = None,
        executed: Executed = "maybe",
    ) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.method = method
        self.call_id = call_id
        self.executed: Executed = executed

    @staticmethod
    def details(error: BaseException) -> CallDetails:
        """The details of a failed call: ``CallError.details(error).rank``.

        An exception that a method raises keeps its own attributes. If an attribute has a name that rlmesh uses too
        (``rank``, ``host``, ``code``), ``error.rank`` is the exception's own; this function returns the call's.

        Raises:
            UsageError: ``error`` is not a `CallError`.
        """
        if not isinstance(error, CallError):
            raise UsageError(f"CallError.details(error): it is a CallError, not {type(error).__name__}")
        stored = object.__getattribute__(error, "__dict__").get(DETAILS)
        if isinstance(stored, CallDetails):
            return stored
        known = {name: getattr(error, name) for name in CallDetails._fields if hasattr(error, name)}
        return CallDetails(**known)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_call_error, (type(self), self.args, self.__dict__.copy()))


DETAILS = "_rlmesh_details"
"""The attribute with the `CallDetails` of an error that a remote method raised."""


def _rebuild_call_error(cls: type[CallError], args: tuple[Any, ...], state: dict[str, Any]) -> CallError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class RemoteError(CallError):
    """The remote method raised.

    The raised object is also an instance of the original exception type if that type can be imported here and the
    memory layouts agree, so ``except ValueError`` works; ``remote_type`` is always its name. Exceptions with a meaning
    for the interpreter (StopIteration, StopAsyncIteration, GeneratorExit, CancelledError, SystemExit,
    KeyboardInterrupt) become a plain `RemoteError`: raised at the caller they would end its loops instead of reporting
    a fault.

    The original's attributes take precedence over the attributes below; `CallError.details` returns all of the latter.

    Attributes:
        remote_type: qualified name of the original exception type.
        remote_message: ``str()`` of the original exception.
        remote_traceback: traceback text made on the remote side.
        remote_causes: the chain of causes, each as ``Type: text``, nearest first.
        host, pid: the process in which the exception was raised.
    """

    code = "RM201"
    text: str = ""
    remote_type: str = ""
    remote_message: str = ""
    remote_traceback: str = ""
    remote_causes: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        # The original type may format itself (KeyError shows a repr), but this text also names the member.
        return self.text or super().__str__()


class CallTimeout(CallError, TimeoutError):
    """The deadline of a call passed before its answer came."""

    code = "RM202"


class PeerLost(CallError, ConnectionError):
    """The called member is dead; ``reason`` is its exit as its agent reported it."""

    code = "RM203"
    reason: str = ""


class CallCancelled(CallError):
    """The call was cancelled before it ended."""

    code = "RM204"


class CallRejected(CallError):
    """The member refused the call without starting it; ``executed`` is always ``no``."""

    code = "RM210"


class MailboxFull(CallRejected):
    """The member's mailbox has no room and the caller asked not to queue."""

    code = "RM211"


class StaleIncarnation(CallRejected):
    """The call was meant for another incarnation of the member, or the member's group restarted during a call to
    several of its ranks."""

    code = "RM212"


class Restarting(CallRejected):
    """The member is being restarted."""

    code = "RM213"


class ShuttingDown(CallRejected):
    """The member or the caller is ending."""

    code = "RM214"


class GroupCallError(ExceptionGroup[Exception], RLMeshError):
    """Several members of a group call failed.

    Attributes:
        failures: rank → error.
        results: rank → value of the members that succeeded.
    """

    code = "RM220"
    failures: Mapping[int, Exception]
    results: Mapping[int, Any]


class WireError(RLMeshError):
    """Bytes that cannot be sent or cannot be understood."""

    code = "RM300"


class VersionMismatch(WireError):
    """The peer speaks another version of the protocol."""

    code = "RM301"


class MalformedFrame(WireError):
    """A frame is truncated or altered."""

    code = "RM302"


class Unserializable(WireError, TypeError):
    """An argument or a result cannot be serialized; the message names it."""

    code = "RM303"


class AuthenticationFailed(WireError):
    """The peer does not hold the key of this job."""

    code = "RM304"


class PayloadTooLarge(WireError):
    """A message exceeds the configured cap; raised at the sender."""

    code = "RM305"


class SlotGone(WireError):
    """The shared memory of a message was reused or is gone, since its sender died before this process could lock it.

    Make the call again, or fetch the value from its producer.
    """

    code = "RM306"


class DeviceUnreachable(WireError):
    """A tensor lies on a device that the receiving process does not see or whose memory it cannot open."""

    code = "RM307"


class PlacementError(RLMeshError):
    """The cluster cannot hold the job; the message has the table of what is short."""

    code = "RM400"


class LeaseTimeout(PlacementError, TimeoutError):
    """A member did not get its devices in time, since another role holds them."""

    code = "RM401"


class LaunchError(RLMeshError):
    """Processes of the job could not be started."""

    code = "RM410"


class PreflightError(RLMeshError):
    """A check that runs before the job starts failed."""

    code = "RM420"


class WeightSyncError(RLMeshError):
    """A weight sync was not committed.

    All sinks keep the weights that they had, except ``in_place`` sinks that were being written to: these refuse to
    serve until weights are pushed to them again.

    Attributes:
        version: the version that was pushed, if there was one.
        receiver: the member that failed (``ROLLOUT:1``), if one did.
        bucket: the bucket at which the sync failed.
    """

    code = "RM500"
    version: int | None = None
    receiver: str | None = None
    bucket: int | None = None


class WeightsNotReady(WeightSyncError):
    """The member has no weights of a known version, so it refuses to serve."""

    code = "RM501"


class SourceRestarted(WeightSyncError):
    """A rank of a weight sync's source restarted and lost what it had learnt since the last push.

    Nothing was pushed, and all sinks serve the weights that they had.

    Attributes:
        members: the ranks that restarted or have older weights.
        sent: the version that was committed last; None if no version is known.
        restored: for each of ``members`` the version that it was restored from; None if it reported none.
    """

    code = "RM502"
    members: tuple[str, ...] = ()
    sent: int | None = None
    restored: Mapping[str, int | None] = {}


class RestartBudgetExhausted(RLMeshError):
    """A role failed more often than its restart policy allows."""

    code = "RM600"


class JobStopped(RLMeshError):
    """The job stopped before its end, after notice (a signal, the end of its time limit).

    It is resumed when it is started again with the same run directory.

    Attributes:
        step: the step after which all ranks stopped; None if they did not finish a step in time.
        run_dir: the folder of the job's logs and metrics, a path as text.
    """

    code = "RM701"
    step: int | None = None
    run_dir: str = ""


class JobFailed(ExceptionGroup[Exception], RLMeshError):
    """The job failed; the group holds the first causes, oldest first.

    Attributes:
        run_dir: the folder of the job's logs and metrics (a path as text, empty if none was made).
        incident: the file with the incident report (empty if none was written).
        node_lost: the first cause is a lost node whose members could not be placed elsewhere.
        shown: the members' output was shown while the job ran.
        stop_signal: number of the signal by which the user stopped the job, 2 for Ctrl-C and
            ``rlmesh stop``; 0: the user did not.
    """

    code = "RM700"
    stop_signal: int = 0
    run_dir: str = ""
    incident: str = ""
    node_lost: bool = False
    shown: bool = False


def is_absent(package: str, error: Exception) -> bool:
    """True if the import of a package failed since it is not installed, and not since something in it fails."""
    return isinstance(error, ModuleNotFoundError) and error.name == package


def import_fault(package: str, error: Exception, extra: str) -> str:
    """Why a package cannot be imported, and what to do: it is not installed, or it is and its import fails.

    Args:
        package: the name of the package that was imported.
        error: what the import raised.
        extra: what ``pip install`` is given for the package, such as ``rlmesh[envs]``.
    """
    if is_absent(package, error):
        return f"{package} is not installed: pip install '{extra}'"
    found = f"{type(error).__name__}: {error}"
    return f"{package} is installed, but its import fails ({found}): repair its installation, or remove it"
