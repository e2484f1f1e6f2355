"""Entry points: what a worker runs, in every form that a job may name it.

============================================  =====================================
``"module.Class"``, ``"module:Class"``        a class; it is built without arguments
``("module", "Class")``, ``"module", "Class"`` the same
``Class``                                     a class object at the top level of a module
``"module.function"``, ``function``           a function without arguments
``"train.py --lr 1"``, ``"-m package.module"`` a script, or a module run as a script
============================================  =====================================

All of them become text (``entry_text``), which is what a job description holds, and are resolved without
importing anything (``resolving.resolve_entry``).
"""

from __future__ import annotations

import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlmesh.job.entry_points.program import main_name

__all__ = ["EntryKind", "EntryLike", "EntryPoint", "entry_text"]

EntryKind = Literal["class", "function", "script"]

EntryLike: TypeAlias = "str | tuple[str, str] | type[Any] | Callable[..., Any]"
"""What builders and descriptors accept as an entry point."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """What a worker runs. ``module`` may be ``__main__``: then the worker imports the submitter's script.

    ``class`` and ``function`` have ``module`` and ``name``. ``script`` has ``script`` (an absolute path) and
    ``args``; with an empty ``script`` it is ``module`` that is run as ``__main__``, as ``python -m`` does.
    """

    kind: EntryKind
    module: str = ""
    name: str = ""
    script: str = ""
    args: tuple[str, ...] = ()


def entry_text(entry: object, class_name: str | None = None) -> str:
    """An entry point in any form as text: ``module.Class``, ``script.py args`` or ``-m module args``.

    Raises:
        ValueError: it has a form that cannot work; the message names the right one.
    """
    if isinstance(entry, tuple | list):
        if class_name is not None or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
            raise ValueError(f"{entry!r} is no entry point: a tuple must be (module, class), two strings")
        entry, class_name = entry
    if isinstance(entry, str) and (class_name is None or isinstance(class_name, str)):
        text = entry.strip()
        if class_name is not None:
            return f"{text}.{class_name.strip()}"
        return text.replace("::", ".").replace(":", ".") if is_dotted(text) else text
    if class_name is not None:
        raise ValueError(f"two arguments must be module and class, both text, not {entry!r}, {class_name!r}")
    return _object_text(entry)


def _object_text(entry: object) -> str:
    module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
    if not callable(entry) or not isinstance(module, str) or not isinstance(name, str):
        raise ValueError(
            f"{entry!r} ({type(entry).__name__}) is no entry point: give a class, a function, 'module.Class' "
            "or a script with its arguments"
        )
    if name == "<lambda>" or "." in name:
        where = "a lambda" if name == "<lambda>" else f"defined inside {name.rpartition('.')[0]!r}"
        raise ValueError(
            f"{name!r} of module {module} is {where}, where workers cannot import it: move it to the top "
            "level of a module"
        )
    if module == "__main__":
        module = main_name() or module
    return f"{module}.{name}"


def is_dotted(text: str) -> bool:
    """Whether it may be the full name of something in a module."""
    parts = text.replace("::", ".").replace(":", ".").split(".")
    return not text.endswith(".py") and len(parts) > 1 and all(_is_name(part) for part in parts)


def _is_name(part: str) -> bool:
    return part.isidentifier() and not keyword.iskeyword(part)
