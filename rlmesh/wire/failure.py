"""Converts exceptions to plain data and back.

The remote side always sends the type's name, the text, the traceback, which it formats itself, and the chain of
causes; and the exception's own state as far as it can be sent. The caller raises a class that derives from
`RemoteError` *and* from the original type, so ``except ValueError`` works. Where the type cannot be imported, the two
memory layouts conflict, or the type has a meaning for the interpreter (`remote_type.CONTROL_FLOW`), the caller raises a
plain `RemoteError` with the type's name.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from rlmesh.errors import DETAILS, CallDetails, CallError, Executed, RemoteError
from rlmesh.wire import remote_type
from rlmesh.wire.remote_type import State

_HOST = socket.gethostname()
_MAX_CAUSES = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """An exception as data.

    Attributes:
        pickled: the error of a call that the method made itself, which is sent unchanged; else None.
        state: the exception's attributes, pickled.
        members: the exceptions of an exception group; else None.
    """

    module: str
    qualname: str
    message: str
    traceback: str
    host: str
    pid: int
    executed: Executed = "yes"
    pickled: bytes | None = None
    causes: tuple[str, ...] = field(default=())
    state: State = field(default_factory=dict)
    members: tuple[FailureRecord, ...] | None = None

    @property
    def type_name(self) -> str:
        return self.qualname if self.module == "builtins" else f"{self.module}.{self.qualname}"


def record(error: BaseException, *, executed: Executed = "yes") -> FailureRecord:
    """Describe an exception. Never raises, whatever the exception's own methods do."""
    module, qualname = _name(error)
    group = isinstance(error, BaseExceptionGroup)
    return FailureRecord(
        module, qualname, message_of(error), format_error(error), _HOST, os.getpid(), executed, _pickled(error),
        tuple(_safely(lambda: _causes(error), [])), _safely(lambda: remote_type.state_of(error), {}),
        _safely(lambda: _members(error), None) if group else None,
    )  # fmt: skip


def _safely(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except BaseException:
        return otherwise


def _name(error: BaseException) -> tuple[str, str]:
    """Module and name of an error's type; for an error from another process, the names that it had there."""
    cls = type(error)
    module = _safely(lambda: "".join((cls.__module__,)), "?")
    qualname: str = type.__dict__["__qualname__"].__get__(cls)
    details = remote_type.own_dict(error).get(DETAILS)
    own_names = ("", qualname, f"{module}.{qualname}")
    if isinstance(details, CallDetails) and details.remote_type not in own_names:  # Its type cannot be made here.
        module, _, qualname = details.remote_type.rpartition(".")
        module = module or "builtins"
    return module, qualname


def message_of(error: BaseException) -> str:
    """The text of an exception. Never raises."""
    try:
        return "".join((str(error),))  # A plain str, even if __str__ returns a subclass.
    except BaseException as broken:
        args = ", ".join(map(remote_type.safe_repr, _safely(lambda: error.args, ())))
        return f"<its __str__ raised {type(broken).__name__}; its arguments: {args or 'none'}>"


def format_error(error: BaseException) -> str:
    """The traceback as text, beginning with the user's own frame. Never raises."""
    try:
        shown = traceback.TracebackException(type(error), error, _user_traceback(error))
        _end_in_user_code(shown)
        return "".join(shown.format())
    except BaseException as broken:
        why = f"(the rest cannot be shown, since formatting the error raised {type(broken).__name__})"
        frames = _safely(lambda: "".join(traceback.format_tb(_user_traceback(error))), "")
        return f"Traceback (most recent call last):\n{frames}{'.'.join(_name(error))}: {message_of(error)} {why}\n"


def _end_in_user_code(shown: traceback.TracebackException) -> None:
    """Drop the last frames of an error and its causes that belong to rlmesh itself, such as those of ``result()``."""
    left, seen = [shown], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        own = [_is_own(frame.filename) for frame in one.stack]
        if issubclass(one.exc_type or Exception, CallError) and not all(own):
            while own and own[-1]:
                own.pop()
                one.stack.pop()
        left += [other for other in (one.__cause__, one.__context__) if other is not None]


def _user_traceback(error: BaseException) -> Any:
    """The traceback without leading frames of rlmesh itself, so that the user's own frame comes first."""
    tb = vars(BaseException)["__traceback__"].__get__(error)
    while tb is not None and tb.tb_next is not None and _is_own(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


_MACHINERY = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), part, "") for part in ("agent", "runtime")
)


def _is_own(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_MACHINERY)


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, CallError) or isinstance(error, RemoteError):
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _members(error: BaseException) -> tuple[FailureRecord, ...]:
    """Records of the exceptions in a group; errors of calls among them keep the member that they came from."""
    assert isinstance(error, BaseExceptionGroup)
    return tuple(map(record, vars(BaseExceptionGroup)["exceptions"].__get__(error)))


def _causes(error: BaseException) -> list[str]:
    found: list[str] = []
    seen = {id(error)}
    current: BaseException | None = error
    while current is not None and len(found) < _MAX_CAUSES:
        cause = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        if cause is None or id(cause) in seen:
            break
        seen.add(id(cause))
        try:
            found.append(f"{type(cause).__qualname__}: {cause}")
        except BaseException:
            found.append(type(cause).__qualname__)
        current = cause
    return found


def rebuild(
    failure: FailureRecord, *, role: str | None, rank: int | None, method: str, call_id: int | None = None
) -> CallError:
    """The error that the caller raises for a remote failure."""
    member = f"{role}:{rank}" if rank is not None else str(role)
    note = f"--- traceback of {member} (pid {failure.pid} on {failure.host}) ---\n{failure.traceback.rstrip()}"
    original = _original(failure)
    if original is not None:
        # The error may be of a call that the method itself made; `executed` must be about this call.
        remote_type.own_dict(original)["executed"] = failure.executed
        if not type(original).__module__.startswith("rlmesh."):
            remote_type.annotate(original, note)
        return original
    details = CallDetails(
        role, rank, method, call_id, failure.executed, failure.type_name, failure.message, failure.traceback,
        failure.causes, failure.host, failure.pid,
    )  # fmt: skip
    where = f"[raised by {member} in {method}()]"
    # Printing an error shows its type before its text, but a plain RemoteError does not have the original type.
    said = f"{failure.type_name}: {failure.message}" if failure.message else failure.type_name
    error = _instance(failure, details, f"{failure.message} {where}".lstrip(), f"{said} {where}")
    remote_type.annotate(error, note)
    return error


def _original(failure: FailureRecord) -> CallError | None:
    if failure.pickled is None:
        return None
    try:
        value = pickle.loads(failure.pickled)
    except Exception:
        return None
    return value if isinstance(value, CallError) else None


def _instance(failure: FailureRecord, details: CallDetails, text: str, plain_text: str = "") -> RemoteError:
    """An error of the original type with ``text``; or a plain `RemoteError` with ``plain_text``, if given."""
    values = remote_type.opened(failure.state)
    cls = _find_type(failure)
    base = remote_type.original_type(cls) if cls is not None else None
    if base is None:
        return remote_type.plain(failure.message, values, details, plain_text or text)
    args = values.get("args", (failure.message,))
    if failure.members is not None:
        first = args[0] if args and isinstance(args[0], str) else failure.message
        args = (first, [_member(member, details) for member in failure.members])
    try:
        return remote_type.build(base, args, values, details, text)
    except Exception:
        return remote_type.plain(failure.message, values, details, plain_text or text)


def _member(failure: FailureRecord, whole: CallDetails) -> CallError:
    """Rebuild an exception of a group."""
    original = _original(failure)
    if original is not None:
        return original
    own = remote_type.opened(failure.state).get(DETAILS)
    if isinstance(own, CallDetails):
        return _instance(failure, own, failure.message)
    details = whole._replace(
        remote_type=failure.type_name, remote_message=failure.message, remote_traceback=failure.traceback,
        remote_causes=failure.causes,
    )  # fmt: skip
    return _instance(failure, details, failure.message)


def _find_type(failure: FailureRecord) -> type[BaseException] | None:
    """The exception's class, if its module is loaded or can be imported here."""
    try:
        found: Any = import_module(failure.module)
        for part in failure.qualname.split("."):
            found = getattr(found, part)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
