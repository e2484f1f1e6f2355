"""Resolving an entry point's text: its source is read, and not imported."""

from __future__ import annotations

import os
import shlex
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlmesh.job.entry_points.entry import EntryKind, EntryPoint, is_dotted
from rlmesh.job.entry_points.program import main_name
from rlmesh.job.entry_points.source_scan import (
    Callee,
    ModuleFacts,
    absolute_name,
    import_root,
    module_file,
    read_module,
    siblings,
)
from rlmesh.job.nearest_name import did_you_mean

__all__ = ["Resolved", "resolve_entry"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """An entry point that was looked up without importing it.

    Attributes:
        entry: the entry point as far as it is known; correct only if there are no problems.
        problems: reasons why it cannot work, one sentence each.
        runs: True for functions and scripts, and for classes that have ``run()``; ``None`` if the source does not show
            it.
        file: the source file, ``None`` if there is none.
        root: the folder that must be importable in the worker, ``None`` if the source is installed.
    """

    entry: EntryPoint
    problems: tuple[str, ...] = ()
    runs: bool | None = None
    file: Path | None = None
    root: Path | None = None


def resolve_entry(text: str) -> Resolved:
    """Look up an entry point's text, without importing it. Never raises."""
    nothing = EntryPoint("class")
    if not text:
        return Resolved(nothing, ("is empty: give 'module.Class', a class, a function or a script",))
    if is_dotted(text):
        module, _, name = text.rpartition(".")
        return _resolve_name(module, name)
    try:
        words = shlex.split(text)
    except ValueError as error:
        return Resolved(nothing, (f"{text!r} cannot be split into a script and its arguments: {error}",))
    if "{" in words[0]:
        return Resolved(nothing, (f"{text!r} holds a brace: is the f of an f-string missing?",))
    if words[0] == "-m" and len(words) > 1:
        return _resolve_module(words[1], tuple(words[2:]))
    if words[0].endswith(".py") or os.sep in words[0]:
        return _resolve_script(words[0], tuple(words[1:]))
    wrong = f"{text!r} is neither 'module.Class' nor 'module.function' nor a script such as 'train.py --lr 1'"
    return Resolved(nothing, (wrong,))


def _resolve_script(script: str, args: tuple[str, ...]) -> Resolved:
    path = Path(os.path.abspath(os.path.expanduser(script)))
    entry = EntryPoint("script", script=str(path), args=args)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py"))[:8] if path.parent.is_dir() else []
        there = f"; {path.parent} has {', '.join(near)}" if near else ""
        return Resolved(entry, (f"there is no script {path}{there}",), True, path)
    return Resolved(entry, (), True, path, path.parent)


def _resolve_module(module: str, args: tuple[str, ...]) -> Resolved:
    entry = EntryPoint("script", module=module, args=args)
    path = module_file(module)
    if path is None:
        return Resolved(entry, (_no_module(module),), True)
    if path.name == "__init__.py":
        runnable = path.with_name("__main__.py")
        if not runnable.is_file():
            return Resolved(entry, (f"package {module} cannot be run: {runnable} is missing",), True, path)
    return Resolved(entry, (), True, path, _local_root(module, path))


def _resolve_name(module: str, name: str) -> Resolved:
    guess: EntryKind = "class" if name[:1].isupper() else "function"
    if module == "__main__":
        module = main_name() or module
    path = module_file(module)
    if path is None:
        return Resolved(EntryPoint(guess, module, name), (_no_module(module),))
    try:
        facts = read_module(path)
        callee, owner, home = _find(facts, module, name)
    except (SyntaxError, ValueError, OSError) as error:
        return Resolved(EntryPoint(guess, module, name), (f"{path} cannot be read: {error}",), None, path)
    root = _local_root(module, path)
    if callee is None:
        problem = () if facts.opaque or name in facts.imported else (_no_name(facts, module, name),)
        return Resolved(EntryPoint(guess, module, name), problem, None, path, root)
    entry = EntryPoint("class" if callee.kind == "class" else "function", module, name)
    problems = _argument_problem(callee, owner.path)
    runs = True if callee.kind == "function" else _has_run(callee, owner, home)
    return Resolved(entry, problems, runs, path, root)


def _no_module(module: str) -> str:
    if module == "__main__":
        return "the class lives in an interactive session, which workers cannot import: put it into a file"
    missing = module
    while "." in missing and module_file(missing.rpartition(".")[0]) is None:
        missing = missing.rpartition(".")[0]
    where = "in its package" if "." in missing else "on sys.path (is its folder on PYTHONPATH?)"
    return f"there is no Python module {missing!r} {where}.{did_you_mean(missing, siblings(missing))}"


def _no_name(facts: ModuleFacts, module: str, name: str) -> str:
    if name in facts.assigned:
        return (
            f"{module}.{name} ({facts.path}:{facts.assigned[name]}) is a variable; an entry point must be a "
            "class or a function"
        )
    return f"module {module} ({facts.path}) defines no {name!r}.{did_you_mean(name, facts.callees)}"


def _argument_problem(callee: Callee, path: Path) -> tuple[str, ...]:
    if not callee.required:
        return ()
    needs = ", ".join(callee.required)
    what = f"{callee.name}.__init__" if callee.kind == "class" else f"{callee.name}()"
    return (
        f"{what} ({path}:{callee.line}) requires arguments ({needs}), but entry points are called without "
        "any: read current_worker().job_info.user_config instead"
        + (f". If other roles are to call it, make it a method: a class with '@rpc def {callee.name}(self, …)'"
           if callee.kind == "function" else ""),
    )  # fmt: skip


def _find(facts: ModuleFacts, module: str, name: str, depth: int = 8) -> tuple[Callee | None, ModuleFacts, str]:
    """Follow a name through imports; return its definition, the facts of the module that has it, and that module's
    name.

    The definition is ``None`` if the sources do not show it.
    """
    callee = facts.callees.get(name)
    if callee is not None or name not in facts.imported or depth == 0:
        return callee, facts, module
    source, original = facts.imported[name]
    absolute = absolute_name(source, module, facts.path) if original else ""
    path = module_file(absolute) if absolute else None
    if path is None:
        return None, facts, module
    return _find(read_module(path), absolute, original, depth - 1)


_KNOWN_RUN = {"BaseTrainer": True, "BaseRLTrainer": True, "BaseWorkload": False, "BaseRLWorkload": False}
"""rlmesh's own base classes; user code imports them from the package, whose names are loaded on demand."""


def _has_run(callee: Callee, owner: ModuleFacts, module: str, depth: int = 8) -> bool | None:
    if "run" in callee.methods:
        return True
    answers = [_base_has_run(base, owner, module, depth) for base in callee.bases if base != "object"]
    if True in answers:
        return True
    return None if None in answers else False


def _base_has_run(base: str, owner: ModuleFacts, module: str, depth: int) -> bool | None:
    last = base.rpartition(".")[2]
    source = owner.imported.get(base.partition(".")[0], ("", ""))[0]
    if last in _KNOWN_RUN and source.partition(".")[0] == "rlmesh":
        return _KNOWN_RUN[last]
    if depth == 0 or "." in base:
        return None
    found, where, home = _find(owner, module, base)
    return _has_run(found, where, home, depth - 1) if found is not None else None


def _local_root(module: str, path: Path) -> Path | None:
    root = import_root(module, path)
    return None if root in _installed_folders() else root


@cache  # sysconfig computes the paths at each call, which takes longer than everything else about an entry point
def _installed_folders() -> frozenset[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return frozenset(Path(sysconfig.get_path(name)).resolve() for name in names)
