"""Loading of an entry point: from its description to the code that the worker runs."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rlmesh.agent.protocol import WorkerSpec
from rlmesh.errors import UsageError
from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.job.entry_points.program import Program, with_submitters
from rlmesh.runtime.rpc import exported
from rlmesh.wire.main_module import MAIN_ALIAS

__all__ = ["Loaded", "call_plainly", "load_entry", "load_user_config", "take_over"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An imported entry point.

    Attributes:
        build: creates the served object, without arguments; None for functions and scripts.
        run: runs a function or a script; None for classes, whose object may have ``run``.
        functions: ``@rpc`` functions at the top level of the entry's module, by remote name.
    """

    build: Callable[[], object] | None
    run: Callable[[], object] | None
    functions: Mapping[str, Callable[..., Any]]


def call_plainly(what: str, function: Callable[..., object], *args: object) -> None:
    """Call a hook or a ``run()``, which must not be ``async def``: nobody would await it.

    Raises:
        UsageError: it is ``async def``.
    """
    result = function(*args)
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError(
            f"{what} is async def, and is called on the main thread without a loop: write def, and asyncio.run(…) what "
            "must be awaited. @rpc methods may be async def"
        )


def take_over(program: Program, roots: Sequence[str], main_path: str) -> None:
    """Set ``sys.path``, ``sys.argv`` and the folder of this process as the submitter had them."""
    sys.path[:] = with_submitters(sys.path, program, roots)
    sys.argv = list(program.args) or [main_path or "rlmesh-worker"]
    _go_to(program.works_in)


def _go_to(folder: str) -> None:
    if folder:
        try:
            os.chdir(folder)
        except OSError:
            pass  # another machine, which does not have the folder


@contextmanager
def _where_it_started(program: Program) -> Iterator[None]:
    _go_to(program.started_in)
    try:
        yield
    finally:
        _go_to(program.works_in)


def load_user_config(spec: WorkerSpec) -> Any:
    """Unpickle the argument of the job's ``.config(...)``. Its classes may come from the user's modules."""
    return pickle.loads(spec.user_config) if spec.user_config else None


def load_entry(entry: EntryPoint, main_path: str, program: Program = Program()) -> Loaded:  # noqa: B008 (it is frozen)
    """Import the entry point, in the folder in which the submitter was started; nothing of it is called.

    Raises:
        UsageError: the module has no such name, or it is neither a class nor a function.
        Exception: any error of the module's import.
    """
    if entry.kind == "script":
        return Loaded(None, lambda: _run_script(entry), {})
    with _where_it_started(program):
        module = _import(entry.module, main_path, program.module)
    found: Any = module
    for part in entry.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            where = getattr(module, "__file__", None) or "no file"
            raise UsageError(
                f"module {entry.module!r} ({where}) has no {entry.name!r} in the worker, although it had one where "
                'the job was submitted: is it defined only under `if __name__ == "__main__"`, or is another '
                "version of the module installed here?"
            ) from None
    functions = exported(module)
    if isinstance(found, type):
        return Loaded(found, None, functions)
    if callable(found):
        return Loaded(None, found, functions)
    raise UsageError(
        f"{entry.module}.{entry.name} is of type {type(found).__name__}; an entry point is a class or a function"
    )


def _import(name: str, main_path: str, main_name: str) -> types.ModuleType:
    if name == "__main__":
        return _import_main(main_path)
    module = importlib.import_module(name)
    if name == main_name:  # the submitter ran it with python -m
        sys.modules[MAIN_ALIAS] = sys.modules["__main__"] = module
    return module


def _import_main(path: str) -> types.ModuleType:
    if not path:
        raise UsageError(
            "the role's class or function was defined in an interactive session, which workers cannot import: "
            "put it into a file"
        )
    if (known := sys.modules.get(MAIN_ALIAS)) is not None and known.__file__ == path:
        return known  # imported by another role of this process
    module = types.ModuleType(MAIN_ALIAS)
    module.__file__ = path
    sys.modules[MAIN_ALIAS] = sys.modules["__main__"] = module
    cloudpickle.register_pickle_by_value(module)  # other processes have no module of this name
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)
    return module


def _run_script(entry: EntryPoint) -> None:
    if entry.script:
        sys.argv = [entry.script, *entry.args]
        sys.path.insert(0, os.path.dirname(entry.script))
        runpy.run_path(entry.script, run_name="__main__")
    else:
        sys.argv = [entry.module, *entry.args]
        runpy.run_module(entry.module, run_name="__main__", alter_sys=True)
