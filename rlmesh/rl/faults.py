"""Values that users write as text, and the faults of what they write: the nearest right names, numbers that are too
small or too large, parameters that nothing fills."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

__all__ = ["MOST_PROCESSES", "MOST_THREADS", "did_you_mean", "similar_path", "too_large", "too_small",
           "unknown_parameters", "value_of"]  # fmt: skip

MOST_PROCESSES, MOST_THREADS = 10_000, 1024
"""Of a role, and of torch in a process."""


def did_you_mean(name: object, valid: Iterable[str], otherwise: str = "") -> str:
    """The end of an error's sentence, such as ``; did you mean 'grpo'?``; ``otherwise`` if no valid name is similar."""
    near = get_close_matches(str(name), list(valid), 1)
    return f"; did you mean {near[0]!r}?" if near else otherwise


def similar_path(path: Path) -> str:
    """The end of an error's sentence about a missing file or folder, with a similar one beside it."""
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    near = get_close_matches(path.name, [one.name for one in path.parent.iterdir()], 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def unknown_parameters(function: Callable[..., Any], known: Collection[str]) -> list[str]:
    """The parameters without a default of a function that have other names than ``known``."""
    return [
        one.name for one in inspect.signature(function).parameters.values()
        if one.name not in known and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]  # fmt: skip


def too_small(settings: object, least: int, *names: str) -> Iterator[str]:
    """One sentence per attribute that is a number below ``least``."""
    for name in names:
        if isinstance(value := getattr(settings, name), int | float) and value < least:
            yield f"{name}={value} must be ≥ {least}"


def too_large(settings: object, most: float, *names: str) -> Iterator[str]:
    """One sentence per attribute that is a number above ``most``."""
    for name in names:
        if isinstance(value := getattr(settings, name), int | float) and value > most:
            yield f"{name}={value} must be ≤ {most}"


PYTHON = {"None": None, "True": True, "False": False}
_NUMBER = r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?"
_NUMBERS = re.compile(rf"\s*{_NUMBER}\s*(,\s*{_NUMBER}\s*)*,?\s*")


def value_of(text: str) -> Any:
    """The value of a text: JSON, or what people write in its place; otherwise the text itself.

    ``64,64``, ``(64, 64)`` and ``[64, 64,]`` are the list that JSON writes ``[64, 64]``; ``None``, ``True`` and
    ``False`` are Python's; ``1_000`` is a number. Tuples become lists, also within lists and dicts.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    plain = text.strip()
    if plain in PYTHON:
        return PYTHON[plain]
    if plain[:1] in ("(", "[", "{") or _NUMBERS.fullmatch(plain):
        try:
            return _lists(ast.literal_eval(plain))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text
    return text


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, list | tuple | set) else value
