"""From the description of an entry point to what the worker runs."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmesh.agent.protocol import WorkerSpec
from rlmesh.errors import UsageError
from rlmesh.job.entry import Entry
from rlmesh.runtime.rpc import exported

__all__ = ["Loaded", "call_plainly", "extend_path", "load_entry", "load_user_config"]

MAIN_ALIAS = "__mp_main__"
"""The submitter's script is imported under this name, so that its ``if __name__ == "__main__"`` does not run;
the same name as with multiprocessing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An entry point that was imported.

    Attributes:
        build: makes the object that is served, without arguments; None for functions and scripts.
        run: what runs for functions and scripts; None for classes, whose object may have ``run``.
        functions: ``@rpc`` functions at the top level of the entry's module, by remote name.
    """

    build: Callable[[], object] | None
    run: Callable[[], object] | None
    functions: Mapping[str, Callable[..., Any]]


def call_plainly(what: str, function: Callable[..., object], *args: object) -> None:
    """Call a hook or a ``run()``, which must not be ``async def``: nobody would await it.

    Raises:
        UsageError: it is.
    """
    result = function(*args)
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError(
            f"{what} is async def, and is called on the main thread without a loop: write def, and asyncio.run(…) what "
            "must be awaited. @rpc methods may be async def"
        )


def extend_path(roots: tuple[str, ...]) -> None:
    """Put the submitter's import roots first on ``sys.path``."""
    rest = [path for path in sys.path if path not in roots]
    sys.path[:] = [*roots, *rest]


def load_user_config(spec: WorkerSpec) -> Any:
    """What the job's ``.config(...)`` was given. Its classes may come from the user's modules."""
    return pickle.loads(spec.user_config) if spec.user_config else None


def load_entry(entry: Entry, main_path: str) -> Loaded:
    """Import the entry point; nothing of it is called.

    Raises:
        UsageError: the module has no such name, or it is neither a class nor a function.
        Exception: whatever the module raises when it is imported.
    """
    if entry.kind == "script":
        return Loaded(None, lambda: _run_script(entry), {})
    module = _import_main(main_path) if entry.module == "__main__" else importlib.import_module(entry.module)
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


def _import_main(path: str) -> types.ModuleType:
    if not path:
        raise UsageError(
            "the role's class or function was defined in an interactive session, which workers cannot import: "
            "put it into a file"
        )
    module = types.ModuleType(MAIN_ALIAS)
    module.__file__ = path
    sys.modules[MAIN_ALIAS] = sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)
    return module


def _run_script(entry: Entry) -> None:
    if entry.script:
        sys.argv = [entry.script, *entry.args]
        sys.path.insert(0, os.path.dirname(entry.script))
        runpy.run_path(entry.script, run_name="__main__")
    else:
        sys.argv = [entry.module, *entry.args]
        runpy.run_module(entry.module, run_name="__main__", alter_sys=True)
