"""Checks of public arguments: a wrong type raises where it is given, not where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType

from rlmesh.errors import UsageError

__all__ = ["MOST_S", "require", "require_choice", "require_number", "require_seconds"]

MOST_S = 1e9
"""The longest time, about thirty years: timers of an event loop cannot count much further."""

Kinds = type | UnionType | tuple[type, ...]


def require(where: str, value: object, kinds: Kinds, what: str) -> None:
    """Check the type of a value.

    Raises:
        UsageError: ``value`` is of none of these kinds; a bool does not count as a number.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise UsageError(f"{where}: {value!r:.80} ({type(value).__name__}) is not {what}")


def require_choice(where: str, value: object, choices: Sequence[str]) -> None:
    """Check that a value is one of several texts.

    Raises:
        UsageError: ``value`` is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{where}: it is one of {', '.join(choices)}, not {value!r:.80}")


def require_number(where: str, value: object, least: int, most: int) -> None:
    """Check a whole number.

    Raises:
        UsageError: ``value`` is not a whole number in this range.
    """
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{where}: it is a whole number from {least} to {most}, not {value!r:.80}")


def require_seconds(where: str, value: object) -> None:
    """Check a time in seconds.

    Raises:
        UsageError: ``value`` is not a number above 0, or above `MOST_S`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_S:
        raise UsageError(f"{where}: it is a number of seconds above 0, not {value!r:.80}")


def refuse_inside_loop(what: str, instead: str) -> None:
    """Refuse a plain ``with`` that would block the running loop.

    Raises:
        UsageError: a loop runs on this thread.
    """
    import asyncio  # Slow to import, and not needed for the rest.

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(f"'with {what}' was used inside a running event loop, which it would block: use '{instead}'")
