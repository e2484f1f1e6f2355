"""Sends classes and functions of ``__main__`` so that they are the same objects on both sides.

The module that one process runs as ``__main__`` is imported from the same file in the workers of its job: as
``__mp_main__`` if it is a script, under its own name if it was run by ``python -m``. Its classes and functions are sent
as references: the program, and the name in it. A receiver that has the same program takes its own object. A
receiver of another program (a service, a worker whose role is defined elsewhere) gets a copy, and sends the copy back
by the same reference. Objects without a name that others could import travel by value: objects of an interactive
session, lambdas, local functions.
"""

from __future__ import annotations

import io
import os
import sys
import weakref
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from rlmesh.errors import Unserializable

__all__ = ["MAIN_ALIAS", "alias_main", "by_value", "program_of", "reduce_object"]

MAIN_ALIAS = "__mp_main__"
"""The name under which workers import the submitter's script, so that its ``if __name__ == "__main__"`` does not run;
multiprocessing uses the same name."""

COPY_LIMIT_BYTES = 1 << 18
"""The largest copy of a class or function that is sent along for receivers of other programs."""

_MAINS = ("__main__", MAIN_ALIAS)
_MODULE = "-m "

_strangers: dict[tuple[str, str], Any] = {}
"""Objects that came by value from other programs, by reference."""
_reference_of: dict[int, tuple[str, str]] = {}
"""References of these objects, by ``id()``; the objects live as long as the process."""


def program_of(module: ModuleType | None) -> str:
    """A text that names the program whose ``__main__`` the module is; empty if other processes cannot import it."""
    if module is None:
        return ""
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    if spec is not None and spec.origin == file:
        return f"{_MODULE}{spec.name}"
    return _real(file) if isinstance(file, str) else ""


_aliased: dict[str, ModuleType] = {}


def alias_main() -> None:
    """Make ``__main__`` known here under the names by which workers import it, in a process that submits a job.

    A pickle or an exception that names a class of the module then finds the class that the program uses.
    """
    main = sys.modules.get("__main__")
    program = program_of(main)
    if main is None or not program:
        return
    for name in (MAIN_ALIAS, program.removeprefix(_MODULE) if program.startswith(_MODULE) else ""):
        if name == MAIN_ALIAS or (name and sys.modules.get(name) in (None, _aliased.get(name))):
            sys.modules[name] = _aliased[name] = main


@lru_cache(maxsize=64)
def _real(file: str) -> str:
    return os.path.realpath(file)


def reduce_object(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The reduction of a class or function that the receiver could not find by its name; None: pickle it normally."""
    if (reduced := _reduce_to_reference(obj)) is not None:
        return reduced
    if "<" in obj.__qualname__ or obj.__module__ in _MAINS:
        return _load_by_value, (by_value(obj, whole=obj),)
    return None


def by_value(value: Any, *, whole: Any = None, **settings: Any) -> bytes:
    """Serialize a value with cloudpickle, but classes and functions of ``__main__`` inside it as references.

    Args:
        whole: a class or function that is always serialized by value.
        settings: arguments of the pickler.
    """
    out = io.BytesIO()
    _by_value_pickler()(out, whole, protocol=5, **settings).dump(value)
    return out.getvalue()


@cache
def _by_value_pickler() -> type[Any]:
    import cloudpickle

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: Any, whole: Any, **settings: Any) -> None:
            super().__init__(file, **settings)
            self._whole = whole

        def reducer_override(self, obj: Any) -> Any:
            if obj is not self._whole and (type(obj) is FunctionType or isinstance(obj, type)):
                reduced = _reduce_to_reference(obj)
                if reduced is not None:
                    return reduced
            return super().reducer_override(obj)

    return ByValue


def _reduce_to_reference(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    known = _reference_of.get(id(obj))
    if known is not None:
        return _rebuild, (*known, _copy_of(obj))
    module, main = obj.__module__, sys.modules.get("__main__")
    if main is None or (module not in _MAINS and module != main.__name__):
        return None
    program = program_of(main)
    if not program or _find(main, obj.__qualname__) is not obj:
        return None
    return _rebuild, (program, obj.__qualname__, _copy_of(obj))


_copies: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


def _copy_of(obj: Any) -> bytes:
    """A class or function by value, for receivers of other programs; empty if it is too large or cannot be pickled."""
    found = _copies.get(obj)
    if found is None:
        import cloudpickle

        try:
            found = cloudpickle.dumps(obj, protocol=5)
        except Exception:
            found = b""
        _copies[obj] = found = found if len(found) <= COPY_LIMIT_BYTES else b""
    return found


def _find(module: ModuleType | None, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _rebuild(program: str, qualname: str, copy: bytes) -> Any:
    main = sys.modules.get("__main__")
    if program == program_of(main) and (own := _find(main, qualname)) is not None:
        return own
    reference = (program, qualname)
    found = _strangers.get(reference)
    if found is None:
        found = _strangers.setdefault(reference, _of_other_program(program, qualname, copy))
        _reference_of[id(found)] = reference
    return found


def _of_other_program(program: str, qualname: str, copy: bytes) -> Any:
    if program.startswith(_MODULE):
        try:
            found = _find(import_module(program.removeprefix(_MODULE)), qualname)
        except ImportError:
            found = None
        if found is not None:
            return found
    if not copy:
        raise Unserializable(
            f"{qualname!r} belongs to the program {program}, which this process (pid {os.getpid()}) does not run, and "
            "cannot be sent by value: define it in a module that both can import"
        )
    return _load_by_value(copy)


def _load_by_value(data: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(data)
