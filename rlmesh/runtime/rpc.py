"""``@rpc``: marks the methods that other members may call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from rlmesh.errors import UsageError
from rlmesh.runtime.argument_types import require, require_number
from rlmesh.runtime.serving.method_kinds import is_on_loop

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
R_co = TypeVar("R_co", covariant=True)

MAX_CONCURRENT = 1 << 16
_MARK = "__rlmesh_rpc__"
_DESCRIPTORS = (staticmethod, classmethod, functools.partialmethod)
_exported: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class RpcMark:
    """The options of ``@rpc``, stored on the function.

    Attributes:
        concurrent: the number of calls that may run at once; 1 is serial.
        main_thread: only the process's main thread may run the function.
    """

    name: str
    concurrent: int = 1
    export: bool = False
    main_thread: bool = False


class _Method(Protocol):
    """A function whose first parameter is called ``self``: for type checkers, a method that ``@rpc`` decorates."""

    def __call__(this, self: Any, *args: Any, **kwargs: Any) -> Any: ...


class _ClassMethod(Protocol):
    def __call__(self, cls: Any, *args: Any, **kwargs: Any) -> Any: ...


_M = TypeVar("_M", bound="_Method | _ClassMethod | staticmethod[..., Any] | classmethod[Any, ..., Any]")


class RpcFunction(Protocol[P, R_co]):
    """The result of ``rpc(function)`` for a plain function, for type checkers: the function itself, or, for a stub, the
    decorator that names a method after it. The overloads tell the two apart by the next call, which has a function as
    its argument, or the function's own arguments."""

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


@overload
def rpc(target: _M, /) -> _M: ...
@overload
def rpc(target: Callable[P, R_co], /) -> RpcFunction[P, R_co]: ...
@overload
def rpc(
    target: str | None = None, /, *, export: bool = False, concurrent: int = 1, main_thread: bool = False
) -> Callable[[F], F]: ...
@overload
def rpc(
    target: Callable[..., Any], /, *, concurrent: int, export: bool = False, main_thread: bool = False
) -> Callable[[F], F]: ...
@overload
def rpc(target: Callable[..., Any], /, *, export: bool, main_thread: bool = False) -> Callable[[F], F]: ...
@overload
def rpc(target: Callable[..., Any], /, *, main_thread: bool) -> Callable[[F], F]: ...
def rpc(target: Any = None, /, *, export: bool = False, concurrent: int = 1, main_thread: bool = False) -> Any:
    """Let other members call a method or a module-level function.

    Forms: ``@rpc``, ``@rpc()``, ``@rpc("name")``, ``@rpc(stub)`` (named as the stub function),
    ``@rpc(export=True)`` (exported in this process wherever it is defined, a function at once),
    ``@rpc(concurrent=n)`` (up to n calls at a time; 1, the default, runs them one after the other), and
    ``@rpc(main_thread=True)`` for a ``def`` method that uses a library which requires the process's main thread:
    while ``run()`` has that thread, calls of the method wait for ``current_worker().step_boundary()`` or the end of
    ``run()``, and calls of other methods may overtake them.

    ``@rpc`` methods of a role's entry class, and ``@rpc`` functions at the top level of its module, are exported
    without ``export=True``.
    """
    require_number("@rpc(concurrent=…), calls at a time", concurrent, 1, MAX_CONCURRENT)
    require("@rpc(main_thread=…)", main_thread, bool, "True or False")
    require("@rpc(export=…)", export, bool, "True or False")
    if main_thread and concurrent > 1:
        raise UsageError(f"@rpc(main_thread=True, concurrent={concurrent}): there is one main thread")

    def mark(function: F, name: str) -> F:
        plain = _underlying(function)
        if main_thread and is_on_loop(plain):
            raise UsageError(f"@rpc(main_thread=True) is for def methods; {name} is async def, which runs on a loop")
        known = callable(plain) or isinstance(plain, functools.partialmethod)
        if not known or isinstance(plain, type) or not hasattr(plain, "__dict__"):
            raise UsageError(f"@rpc is for functions and methods, not for {function!r:.80}")
        setattr(plain, _MARK, RpcMark(name, concurrent, export, main_thread))
        if export and _is_plain_function(plain):
            export_function(plain, name)
        return function

    if isinstance(target, str):
        if not target:
            raise UsageError('@rpc(""): the name of a method is not empty')
        return lambda function: mark(function, target)
    if target is None:
        return lambda function: mark(function, _own_name(function))
    if not callable(target) and not isinstance(target, _DESCRIPTORS):
        raise UsageError(f"@rpc({target!r}): pass a name, a stub function, or nothing")
    name = _own_name(target)
    if _is_defined_already(target):
        return lambda function: mark(function, name)
    return mark(target, name)


def _own_name(function: Any) -> str:
    name = getattr(_underlying(function), "__name__", None)
    if not isinstance(name, str):
        raise UsageError(f'@rpc({function!r:.80}): it has no name; give it one: @rpc("name"), or rpc("name")(…)')
    return name


def _is_plain_function(function: Any) -> bool:
    """True for a top-level or local function, False for a method, which a class body encloses directly."""
    enclosing = getattr(function, "__qualname__", ".").rpartition(".")[0]
    return not enclosing or enclosing.endswith("<locals>")


def _underlying(function: Any) -> Any:
    return function.__func__ if isinstance(function, staticmethod | classmethod) else function


def _is_defined_already(function: Any) -> bool:
    """Tell ``@rpc(stub)`` from ``@rpc`` on a definition: both call ``rpc(function)``.

    While a definition is being decorated, no namespace holds it yet. A stub is found under its own name in its module,
    a local stub among the local names of the code around ``@rpc(stub)``.
    """
    plain = _underlying(function)
    found: Any = sys.modules.get(plain.__module__)
    for part in getattr(plain, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if found is not None and _underlying(found) is plain:
        return True
    frame = inspect.currentframe()
    while frame is not None:
        # A local stub is a local name of the function around the class, or around the function, with ``@rpc(stub)``.
        own = frame.f_code.co_filename == __file__
        if not own and any(value is function for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def export_function(function: Callable[..., Any], name: str) -> None:
    """Let every member of this process serve ``function`` under ``name``."""
    known = _exported.get(name)
    if known is not None and known is not function and known.__qualname__ != function.__qualname__:
        raise UsageError(f"@rpc(export=True): {name!r} is exported already by {known.__module__}.{known.__qualname__}")
    _exported[name] = function


def exported_functions() -> Mapping[str, Callable[..., Any]]:
    """Functions marked ``@rpc(export=True)`` in this process so far."""
    return _exported


def mark_of(function: Any) -> RpcMark | None:
    made_by = getattr(function, "_partialmethod", None) or getattr(function, "__partialmethod__", None)
    found = getattr(made_by or _underlying(function), _MARK, None)
    return found if isinstance(found, RpcMark) else None


def method_name(method: Any) -> str:
    """The remote name of the first argument of ``call``: a function, a method, a stub, or text.

    Raises:
        UsageError: the argument is none of these, or has no name.
    """
    if isinstance(method, str):
        return method
    if not callable(method) and not isinstance(method, staticmethod | classmethod):
        raise UsageError(f"call({method!r}): the method is a function, a method or its name as text")
    mark = mark_of(method)
    if mark is not None:
        return mark.name
    name = getattr(_underlying(method), "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise UsageError(f"call({method!r}): it has no name; pass the method's name as text")
    return name


def has_parameter(method: Any, name: str) -> bool | None:
    """True if a method that was passed to ``call`` has a parameter of that name.

    None if this is not known: the method was given by its name as text, or takes any keyword.
    """
    if isinstance(method, str):
        return None
    try:
        parameters = inspect.signature(_underlying(method)).parameters
    except (TypeError, ValueError):
        return None
    if name in parameters:
        return True
    return None if any(found.kind is found.VAR_KEYWORD for found in parameters.values()) else False


def exported(obj: object) -> dict[str, Callable[..., Any]]:
    """The bound ``@rpc`` methods of an object, or the ``@rpc`` functions of a module, by remote name.

    Raises:
        UsageError: a class exports two methods under one name.
    """
    if isinstance(obj, ModuleType):
        members = [(n, v) for n, v in vars(obj).items() if callable(v) and getattr(v, "__module__", "") == obj.__name__]
        return {mark.name: value for _, value in members if (mark := mark_of(value)) is not None}
    methods: dict[str, Callable[..., Any]] = {}
    for cls in reversed(type(obj).__mro__):
        own: dict[str, Any] = {}
        for attribute, raw in vars(cls).items():
            if (mark := mark_of(raw)) is None:
                continue
            if own.setdefault(mark.name, raw) is not raw:
                raise UsageError(f"{cls.__qualname__} exports two methods as {mark.name!r}; {attribute} is the second")
            methods[mark.name] = getattr(obj, attribute)
    return methods
