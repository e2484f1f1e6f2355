"""Makes the classes and objects of exceptions that another process raised.

The class of such an exception derives from the original type and from `RemoteError`. The object is built without the
original's ``__init__``, ``__new__``, ``__setattr__`` and ``__reduce__``, any of which may fail or have side effects;
it gets the attributes of the original.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from rlmesh.errors import DETAILS, CallDetails, CallError, RemoteError, RLMeshError

CONTROL_FLOW = (
    StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt, asyncio.CancelledError,
    concurrent.futures.CancelledError,
)  # fmt: skip
"""Types with a meaning for the code that runs the caller: an iteration's end, a cancelled task, Ctrl-C."""

_TEXT = "_rlmesh_text"
_NOTES = "__notes__"
_OURS = (*CallDetails._fields, "text")
_OBJECTS_OWN = frozenset({"__dict__", "__weakref__", "__traceback__", "__cause__", "__context__", "args"})
_BASES = (Exception, BaseException, object)

State = Mapping[str, bytes]
"""Pickles of an exception's attributes, by name; its arguments are under ``args``."""


# Reading an exception. The only code of the exception that runs here is that of pickling its values.


def own_dict(error: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(error, "__dict__")
    return found


def state_of(error: BaseException) -> State:
    """The exception's attributes, without those that cannot be sent and those that rlmesh itself set."""
    values: dict[str, Any] = {}
    for cls in reversed(type(error).__mro__):
        for name, descriptor in _members(cls):
            try:
                value = descriptor.__get__(error, type(error))
            except Exception:
                continue  # a slot without a value
            if value is not None or cls.__module__ != "builtins":  # in builtins None means "not set"
                values[name] = value
    own = own_dict(error)
    values.update(own)
    if isinstance(error, RemoteError):
        details = _details_of(own) if type(error) is not RemoteError else None
        for name in _OURS:
            if name in values and (details is None or values[name] is getattr(details, name, own.get(_TEXT))):
                del values[name]
        values.pop(_TEXT, None)
    state = {name: data for name, value in values.items() if (data := _pickled(value)) is not None}
    state["args"] = _pickled_args(_args_of(error))
    return state


def _details_of(own: Mapping[str, Any]) -> CallDetails | None:
    found = own.get(DETAILS)
    return found if isinstance(found, CallDetails) else None


def _members(cls: type) -> list[tuple[str, Any]]:
    """The slots of a class, and the fields of types that are written in C (``OSError.filename``)."""
    if cls in (BaseException, object):
        return []
    return [
        (name, value)
        for name, value in vars(cls).items()
        if isinstance(value, MemberDescriptorType | GetSetDescriptorType) and name not in _OBJECTS_OWN
    ]


def _args_of(error: BaseException) -> tuple[Any, ...]:
    found: tuple[Any, ...] = vars(BaseException)["args"].__get__(error)
    return found


def _pickled_args(args: tuple[Any, ...]) -> bytes:
    whole = _pickled(args)
    return whole if whole is not None else pickle.dumps(tuple(a if _pickled(a) else safe_repr(a) for a in args))


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def safe_repr(value: Any) -> str:
    try:
        return "".join((repr(value),))
    except BaseException:
        return f"<{type(value).__name__}>"


# Building an exception.


def opened(state: State) -> dict[str, Any]:
    """The attributes of a state that can be unpickled here."""
    values = {}
    for name, data in state.items():
        try:
            values[name] = pickle.loads(data)
        except Exception:
            continue
    return values


def plain(message: str, values: Mapping[str, Any], details: CallDetails, text: str) -> RemoteError:
    """A plain `RemoteError`, with the attributes of the original whose names rlmesh does not use."""
    error = RemoteError.__new__(RemoteError, message)
    ours = (*_OURS, "args", "code", DETAILS, "details", "with_traceback", "add_note")
    own_dict(error).update({name: value for name, value in values.items() if name not in ours})
    own_dict(error).update(details._asdict(), text=text, **{DETAILS: details, _TEXT: text})
    return error


def build(
    base: type[Exception], args: tuple[Any, ...], values: Mapping[str, Any], details: CallDetails, text: str
) -> RemoteError:
    """An exception that is a ``base`` and a `RemoteError`.

    Raises:
        TypeError: the memory layouts conflict, or ``base`` cannot be subclassed.
    """
    cls = combine(base)
    error = _new(cls, args)
    vars(BaseException)["args"].__set__(error, args)
    fields = {name: descriptor for kind in reversed(base.__mro__) for name, descriptor in _members(kind)}
    own = own_dict(error)
    for name, value in values.items():
        if name in ("args", DETAILS):
            continue
        if name in fields:
            try:
                fields[name].__set__(error, value)
            except Exception:
                pass  # a read-only field, which `_new` has set
        else:
            own[name] = value
    for name, value in (*details._asdict().items(), ("text", text)):
        if name not in values and not _defines(base, name):
            own[name] = value
    own[DETAILS], own[_TEXT] = details, text
    return error


def _new(cls: type[RemoteError], args: tuple[Any, ...]) -> RemoteError:
    """An empty object, made by the ``__new__`` of a base that is written in C."""
    for base in cls.__mro__:
        made = vars(base).get("__new__")
        if not isinstance(made, BuiltinFunctionType):
            continue
        try:
            error = base.__new__(cls, *args)
        except TypeError:
            continue  # another base may work
        if isinstance(error, RemoteError):
            return error
    raise TypeError(f"{cls.__qualname__} cannot be made")


def _defines(base: type[Exception], name: str) -> bool:
    """True if the user's class has an attribute of this name: a default, a property, a slot, a method."""
    return any(name in vars(kind) for kind in base.__mro__ if kind not in _BASES and not issubclass(kind, CallError))


def annotate(error: BaseException, note: str) -> None:
    """Like ``add_note``, but without the exception's own ``__setattr__``."""
    own = own_dict(error)
    notes = own.get(_NOTES)
    own[_NOTES] = [*notes, note] if isinstance(notes, list) else [note]


_combined: dict[type[Exception], type[RemoteError]] = {}


def combine(original: type[Exception]) -> type[RemoteError]:
    """A class that is a `RemoteError` and an ``original``. Raises TypeError if their layouts conflict."""
    found = _combined.get(original)
    if found is None:
        namespace: dict[str, Any] = {
            "__module__": original.__module__, "__qualname__": original.__qualname__, "__str__": _str,
            "__repr__": _repr, "__reduce__": _reduce, "__reduce_ex__": _reduce,
        }  # fmt: skip
        # The original's attributes and methods come first. For rlmesh's own errors those of `RemoteError` do.
        ours = issubclass(original, RLMeshError)
        bases = (RemoteError, original) if ours else (original, RemoteError)
        found = type(original.__name__, bases, namespace)
        _combined[original] = found
    return found


def original_type(cls: type[BaseException]) -> type[Exception] | None:
    """The user's exception type in ``cls``, which may be a combined class that passed several processes; None if the
    caller must get a plain `RemoteError`."""
    if issubclass(cls, BaseExceptionGroup) and not issubclass(cls, Exception):
        return ExceptionGroup
    for base in cls.__mro__:
        if not issubclass(base, Exception) or issubclass(base, (CallError, *CONTROL_FLOW)):
            continue
        if base not in (RLMeshError, Exception):
            return base
    return Exception if cls is Exception else None


def _str(error: RemoteError) -> str:
    return str(own_dict(error).get(_TEXT, ""))


def _repr(error: RemoteError) -> str:
    try:
        base = original_type(type(error)) or Exception
        return "".join((base.__repr__(error),))
    except BaseException:
        return f"{type(error).__name__}({_str(error)!r})"


def _reduce(error: RemoteError, protocol: int = 0) -> tuple[Any, ...]:
    details = _details_of(own_dict(error)) or CallDetails()
    return _rebuild, (original_type(type(error)), state_of(error), details, _str(error))


def _rebuild(base: type[Exception], state: State, details: CallDetails, text: str) -> RemoteError:
    values = opened(state)
    return build(base, values.get("args", ()), values, details, text)
