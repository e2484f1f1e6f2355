"""Values that users write as text, and the faults of what they write: the nearest right names, numbers that are too
small or too large, parameters that nothing fills."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

from rlmesh.rl.trainers.other_names import ELSEWHERE

__all__ = [
    "MOST_PROCESSES", "MOST_THREADS", "CheckedKeywords", "did_you_mean", "keys_of", "similar_path", "too_large",
    "too_small", "unknown_key", "unknown_parameters", "value_of",
]  # fmt: skip

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


class CheckedKeywords:
    """Base of dataclasses that users fill: a keyword argument that does not exist raises an error that suggests the
    right name."""

    __slots__ = ()

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Make an object whose ``__init__`` takes these arguments.

        Raises:
            TypeError: ``__init__`` has no parameter of a given name.
        """
        parameters = inspect.signature(cls.__init__).parameters
        unknown = [name for name in keywords if name not in parameters]
        if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            try:
                sections = dict(keys_of(cls))
            except (NameError, TypeError):  # a subclass whose annotations cannot be resolved, or that is no dataclass
                sections = {"": tuple(parameters)[1:]}
            sentences = [f"{cls.__name__}({name}=…): {unknown_key(name, sections)}" for name in unknown]
            raise TypeError("\n  ".join(sentences))
        return super().__new__(cls)


def keys_of(settings: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Pairs of a section and its keys, for settings given as an object or as a class; ``""`` is the outermost
    section."""
    own = tuple(one.name for one in dataclasses.fields(settings) if one.init)
    yield "", own
    hints = get_type_hints(settings if isinstance(settings, type) else type(settings))
    for name in own:
        current = getattr(settings, name, None) if not isinstance(settings, type) else None
        for kind in (type(current), *(get_args(hints[name]) or (hints[name],))):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                for inner, keys in keys_of(kind):
                    yield f"{name}.{inner}".rstrip("."), keys
                break


def unknown_key(place: str, sections: Mapping[str, Sequence[str]]) -> str:
    """The message about a key that does not exist, with the key that was probably meant, in this section or another.

    Args:
        place: the key with its sections, such as ``actor.learning_rte``.
        sections: the keys of each section; ``""`` is the outermost section.
    """
    section, _, key = place.rpartition(".")
    own = sections.get(section, ())
    elsewhere = [name for name, keys in sections.items() if name != section and key in keys]
    # Names of other libraries; the one that has most sections of the place first.
    named = sorted((n for n in ELSEWHERE if f".{place}".endswith(f".{n}") or n == key), key=len, reverse=True)
    fault = f"there is no setting {place!r}"
    if near := get_close_matches(key, own, 1, cutoff=0.85):
        return f"{fault}; did you mean {f'{section}.{near[0]}'.lstrip('.')}?"
    if elsewhere:
        meant = [ELSEWHERE[name].rpartition(".")[0] for name in named[:1]]
        elsewhere.sort(key=lambda name: name not in meant)
        first, *others = [f"{name}.{key}".lstrip(".") for name in elsewhere]
        belongs = f"the section {elsewhere[0]}" if elsewhere[0] else "no section"
        too = f" There is {' and '.join(others)} too." if others else ""
        return f"{fault}: it belongs to {belongs}; did you mean {first}?{too}"
    if not named and (near := get_close_matches(key, own, 1)):
        return f"{fault}; did you mean {f'{section}.{near[0]}'.lstrip('.')}?"
    # Without a similar key in this section, another library's name is suggested, but only if it is very similar.
    if named := named or get_close_matches(key, ELSEWHERE, 1, cutoff=0.85):
        return f"{fault}; did you mean {ELSEWHERE[named[0]]}? It corresponds to {named[0]} in other libraries."
    for name, keys in sections.items():
        if near := get_close_matches(key, keys, 1, cutoff=0.7):
            return f"{fault}; did you mean {f'{name}.{near[0]}'.lstrip('.')}?"
    return f"{fault}; the keys here are {', '.join(own)}" if own else fault


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
