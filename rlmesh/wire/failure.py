"""Exceptions as plain data, and back.

The remote side always sends the type's name, the text, the traceback it formatted itself and the chain of
causes; the exception object is a bonus. The caller raises a class that derives from `RemoteError` *and* from
the original type, so ``except ValueError`` works; where the type cannot be imported, or the two memory layouts
conflict, it is a plain `RemoteError` that knows the name.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from rlmesh.errors import CallError, Executed, RemoteError, RLMeshError

_HOST = socket.gethostname()
_MAX_CAUSES = 8


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """An exception as data. ``pickled`` is the exception object if it survived a round trip, else None."""

    module: str
    qualname: str
    message: str
    traceback: str
    host: str
    pid: int
    executed: Executed = "yes"
    pickled: bytes | None = None
    causes: tuple[str, ...] = field(default=())

    @property
    def type_name(self) -> str:
        return self.qualname if self.module == "builtins" else f"{self.module}.{self.qualname}"


def record(error: BaseException, *, executed: Executed = "yes") -> FailureRecord:
    """Describe an exception. Never raises, whatever the exception's own methods do."""
    cls = type(error)
    try:
        message = str(error)
    except Exception as broken:
        message = f"<its __str__ raised {type(broken).__name__}>"
    return FailureRecord(
        cls.__module__, cls.__qualname__, message, format_error(error), _HOST, os.getpid(), executed, _pickled(error),
        tuple(_causes(error)),
    )  # fmt: skip


def format_error(error: BaseException) -> str:
    """The traceback as text, beginning with the user's own frame. Never raises."""
    try:
        told = traceback.TracebackException(type(error), error, _user_traceback(error))
        _end_in_user_code(told)
        return "".join(told.format())
    except Exception:
        return f"{type(error).__qualname__}, whose traceback cannot be formatted\n"


def _end_in_user_code(told: traceback.TracebackException) -> None:
    """Drop the last frames that belong to rlmesh itself, such as those of ``result()``, of an error and its causes."""
    left, seen = [told], set[int]()
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
    """Drop the leading frames that belong to rlmesh itself: the user's own frame comes first."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and _is_own(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


_MACHINERY = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), part, "") for part in ("agent", "runtime")
)


def _is_own(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_MACHINERY)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _causes(error: BaseException) -> list[str]:
    found: list[str] = []
    seen = {id(error)}
    current: BaseException | None = error
    while current is not None and len(found) < _MAX_CAUSES:
        following = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        if following is None or id(following) in seen:
            break
        seen.add(id(following))
        try:
            found.append(f"{type(following).__qualname__}: {following}")
        except Exception:
            found.append(type(following).__qualname__)
        current = following
    return found


def rebuild(
    failure: FailureRecord, *, role: str | None, rank: int | None, method: str, call_id: int | None = None
) -> CallError:
    """The error that the caller raises for a remote failure."""
    original = _original(failure)
    if isinstance(original, CallError) and not isinstance(original, RemoteError):
        # It may be of a call that the method itself had made: what counts here is whether this one ran.
        original.executed = failure.executed
        return original
    error = _instance(original, failure)
    member = f"{role}:{rank}" if rank is not None else str(role)
    # Who prints an error puts its type before its text; a plain RemoteError does not have the type.
    what = f"{failure.type_name}: " if type(error) is RemoteError else ""
    error.text = f"{what}{failure.message} [raised by {member} in {method}()]"
    error.role, error.rank, error.method, error.call_id = role, rank, method, call_id
    error.executed = failure.executed
    error.remote_type = failure.type_name
    error.remote_message = failure.message
    error.remote_traceback = failure.traceback
    error.remote_causes = failure.causes
    error.host, error.pid = failure.host, failure.pid
    error.add_note(f"--- traceback of {member} (pid {failure.pid} on {failure.host}) ---\n{failure.traceback.rstrip()}")
    return error


def _original(failure: FailureRecord) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        value = pickle.loads(failure.pickled)
    except Exception:
        return None
    return value if isinstance(value, BaseException) else None


def _instance(original: BaseException | None, failure: FailureRecord) -> RemoteError:
    cls = type(original) if original is not None else _find_type(failure)
    base = original_type(cls) if cls is not None else None
    if base is None:
        return _plain(failure)
    args = original.args if original is not None else (failure.message,)
    try:
        combined = combine(base)
        error: RemoteError = combined.__new__(combined, *args)
        error.args = args
        try:
            # Types such as OSError fill their slots in __init__; one with required arguments of its own may refuse.
            base.__init__(error, *args)
        except Exception:
            error.args = args
        if original is not None:
            error.__dict__.update(original.__dict__)
        return error
    except Exception:
        return _plain(failure)


def _plain(failure: FailureRecord) -> RemoteError:
    error = RemoteError.__new__(RemoteError, failure.message)
    error.args = (failure.message,)
    return error


def _find_type(failure: FailureRecord) -> type[BaseException] | None:
    """The exception's class, if its module is loaded or can be imported here."""
    try:
        found: Any = import_module(failure.module)
        for part in failure.qualname.split("."):
            found = getattr(found, part)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


_combined: dict[type[Exception], type[RemoteError]] = {}


def combine(original: type[Exception]) -> type[RemoteError]:
    """A class that is a `RemoteError` and an ``original``. Raises TypeError if their layouts conflict."""
    found = _combined.get(original)
    if found is None:
        namespace: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        namespace["__reduce__"] = _reduce_combined
        found = type(original.__name__, (RemoteError, original), namespace)
        _combined[original] = found
    return found


def original_type(cls: type[BaseException]) -> type[Exception] | None:
    """The user's exception type in ``cls``, which may be a combined class that passed several processes."""
    ours = (CallError, RLMeshError)
    for base in cls.__mro__:
        if issubclass(base, Exception) and not issubclass(base, CallError) and base not in (*ours, Exception):
            return base
    return Exception if cls is Exception else None


def _reduce_combined(error: RemoteError) -> tuple[Any, ...]:
    return _rebuild_combined, (original_type(type(error)), error.args, error.__dict__.copy())


def _rebuild_combined(original: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> RemoteError:
    cls = combine(original)
    error: RemoteError = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
