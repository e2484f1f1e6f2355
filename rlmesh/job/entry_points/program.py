"""The program that submits a job, as its workers must reproduce it.

A worker imports the submitter's script with the same arguments, import folders, working directory and interpreter
flags, so that the script's top level has the same result there.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Program", "main_name", "main_path", "started_as", "this_program", "with_submitters"]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"


STARTED_IN = _working_directory()
"""Working directory when rlmesh was imported: a script may change it before it submits."""


@dataclass(frozen=True, slots=True)
class Program:
    """Properties of the submitter that its workers adopt.

    Attributes:
        args: the original ``sys.argv``, even if the program has changed it.
        module: name of the ``__main__`` module if it was run by ``python -m``.
        started_in: the working directory at the start, in which the modules are imported.
        works_in: the working directory when it submitted.
        first, last: folders of its ``sys.path`` before and after the interpreter's own.
        flags: flags of the interpreter, such as ``-O``, ``-X`` and ``-W`` with their values.
    """

    args: tuple[str, ...] = ()
    module: str = ""
    started_in: str = ""
    works_in: str = ""
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


_started: list[tuple[str, ...]] = []
"""Arguments of scripts that run inside another program, the innermost last."""


@contextmanager
def started_as(args: Sequence[str]) -> Iterator[None]:
    """Declare that within the block this process runs another script, with this ``sys.argv``."""
    _started.append(tuple(args))
    try:
        yield
    finally:
        _started.pop()


def this_program() -> Program:
    """Return the program that this process runs."""
    flags, args = split_command(sys.orig_argv[1:])
    first, last = split_path(sys.path, _folders_of_the_interpreter())
    own = tuple(sys.argv) if args is None else (*sys.argv[:1], *args)
    return Program(_started[-1] if _started else own, main_name(), STARTED_IN, _working_directory(), first, last, flags)


def main_path() -> str:
    """Return the absolute path of the script that this process runs; empty in an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(STARTED_IN, file).resolve()) if file else ""


def main_name() -> str:
    """Return the module that this process runs as ``__main__`` by ``python -m``; empty if it runs a script."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None and spec.origin == getattr(main, "__file__", None) else ""


def split_command(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the interpreter's flags for the workers, and the arguments of the program; None if there is no program.

    Args:
        words: a command line, without the interpreter.
    """
    flags: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            del rest[: word == "--check-hash-based-pycs"]
            continue
        for at, letter in enumerate(word[1:], 2):
            value = word[at:]
            if letter in "cm":
                return tuple(flags), tuple(rest if value else rest[1:])
            if letter in "WX":
                flags += [f"-{letter}", value or (rest.pop(0) if rest else "")]
                break
            if letter in "OBb":
                flags.append(f"-{letter}")
    return tuple(flags), tuple(rest[1:]) if rest else None


def split_path(path: Sequence[object], interpreter: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders before the interpreter's own and those after them, all absolute."""
    first: list[str] = []
    last: list[str] = []
    found = first
    for entry in path:
        if not isinstance(entry, str):
            continue
        folder = entry if os.path.isabs(entry) else _absolute(entry)
        if folder in interpreter:
            found = last
        elif folder not in (*first, *last):
            found.append(folder)
    return tuple(first), tuple(last)


def _absolute(entry: str) -> str:
    here = os.path.abspath(entry)
    return here if os.path.exists(here) else os.path.normpath(os.path.join(STARTED_IN, entry))


def _folders_of_the_interpreter() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    standard = folders[0]
    return (*folders, os.path.join(standard, "lib-dynload"), os.path.join(os.path.dirname(standard), archive))


def with_submitters(path: Sequence[str], program: Program, roots: Sequence[str]) -> list[str]:
    """Return a worker's ``sys.path`` with the submitter's folders before and after the interpreter's own.

    ``roots`` come first, unless they are in the path already.
    """
    own = [entry for entry in path if entry not in program.first]
    whole = [*program.first, *own]
    whole += [entry for entry in program.last if entry not in whole]
    return [*(root for root in roots if root not in whole), *whole]
