"""Arguments of a wrong type are told where they are given, not where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType

from rlmesh.errors import UsageError

__all__ = ["MOST_S", "require", "require_choice", "require_number", "require_seconds"]

MOST_S = 1e9
"""Thirty years; timers of an event loop cannot count much further."""

Kinds = type | UnionType | tuple[type, ...]


def require(where: str, value: object, kinds: Kinds, what: str) -> None:
    """Raises:
    UsageError: ``value`` is of none of these kinds; a bool is no number.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise UsageError(f"{where}: {value!r:.80} ({type(value).__name__}) is not {what}")


def require_choice(where: str, value: object, choices: Sequence[str]) -> None:
    """Raises:
    UsageError: ``value`` is none of these texts.
    """
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{where}: it is one of {', '.join(choices)}, not {value!r:.80}")


def require_number(where: str, value: object, least: int, most: int) -> None:
    """Raises:
    UsageError: ``value`` is no whole number in this range.
    """
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{where}: it is a whole number from {least} to {most}, not {value!r:.80}")


def require_seconds(where: str, value: object) -> None:
    """Raises:
    UsageError: ``value`` is no time.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_S:
        raise UsageError(f"{where}: it is a number of seconds above 0, not {value!r:.80}")


def refuse_inside_loop(what: str, instead: str) -> None:
    """Raises UsageError where a plain ``with`` would block a running loop."""
    import asyncio  # Slow to import, and not needed for the rest.

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(f"'with {what}' was used inside a running event loop, which it would block: use '{instead}'")
