"""`Allowed`: the values that a setting may have, in words and as a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np

from rlmesh.envs.environments.registry import did_you_mean

__all__ = [
    "DICT", "FLAG", "SHARE", "WEIGHT", "Allowed", "faults_of", "list_of", "number", "one_of", "optional", "plain",
    "schedule", "whole",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a setting may have.

    Attributes:
        text: the values in words, as errors say them.
        accepts: True for a value that is allowed; a value of a strange type may raise TypeError or ValueError.
        names: of settings that are a choice: the names, of which errors tell the nearest one.
        nearest: the allowed value that is nearest to one that is not; None if there is no such value.
    """

    text: str
    accepts: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    nearest: Callable[[Any], Any] = field(default=lambda value: None)

    def fault(self, name: str, value: Any, default: Any = None) -> str | None:
        """The error text for a setting with a value that is not allowed; None for one that is.

        Args:
            default: the default of the setting, which the text tells if no allowed value is the nearest one.
        """
        try:
            if self.accepts(value):
                return None
        except (TypeError, ValueError, OverflowError):
            pass
        if self.names:
            hint = f".{did_you_mean(str(value), self.names, listed=False)}"
        elif (nearest := self.nearest(value)) is not None:
            hint = f"; the nearest is {nearest!r}"
        else:
            hint = f"; the default is {default!r}" if _is(default, Real) and _is(value, Real) else ""
        return f"{name}: {self.text}, not {value!r}{hint}"


def whole(least: int, most: int | None = None) -> Allowed:
    """Whole numbers from ``least`` on, up to ``most``."""

    def accepts(value: Any) -> bool:
        return bool(_is(value, Integral) and value >= least and (most is None or value <= most))

    def nearest(value: Any) -> int | None:
        if not _is(value, Real) or math.isnan(value):
            return None
        if value <= least:
            return least
        return most if most is not None and value >= most else round(value) if math.isfinite(value) else None

    text = f"of at least {least}" if most is None else f"between {least} and {most}"
    return Allowed(f"a whole number {text}", accepts, nearest=nearest)


def number(least: float = -math.inf, most: float = math.inf, *, above: bool = False, endless: bool = False) -> Allowed:
    """Numbers from ``least`` to ``most``; NaN is none.

    Args:
        above: ``least`` itself is not allowed.
        endless: infinity is allowed, for limits that may be absent.
    """
    ends = f" and at most {most}" if above and most < math.inf else ""
    text = f"above {least}{ends}" if above else f"between {least} and {most}" if most < math.inf else ""
    text = text or (f"of at least {least}" if least > -math.inf else "that is finite")

    def accepts(value: Any) -> bool:
        fits = _is(value, Real) and (least < value if above else least <= value) and value <= most
        return bool(fits and (endless or math.isfinite(value)))

    def nearest(value: Any) -> float | None:
        if not _is(value, Real) or math.isnan(value):
            return None
        bound = most if value > most or value == math.inf else least
        return bound if accepts(bound) and math.isfinite(bound) else None

    return Allowed(f"a number {text}", accepts, nearest=nearest)


def schedule(constant: Allowed, points: Allowed | None = None) -> Allowed:
    """A constant, or two and more points ``[[0, value], [step, value], …]`` with growing steps and values like it.

    Args:
        points: what values of points may be, if that differs.
    """

    def accepts(value: Any) -> bool:
        if constant.accepts(value):
            return True
        steps, values = zip(*value, strict=True)
        grows = len(steps) > 1 and steps[0] == 0 and all(a < b for a, b in pairwise(steps)) and math.isfinite(steps[-1])
        return grows and all(_is(step, Real) for step in steps) and all(map((points or constant).accepts, values))

    def nearest(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == 1 and len(value[0]) == 2 and constant.accepts(value[0][1]):
            return value[0][1]  # one point is a constant
        return constant.nearest(value)

    other = f" (value: {points.text})" if points else ""
    text = f"{constant.text}, or points [[0, value], [step, value], …]{other} with growing steps"
    return Allowed(text, accepts, nearest=nearest)


def optional(allowed: Allowed) -> Allowed:
    """The same values, and None."""
    return Allowed(
        f"{allowed.text}, or None", lambda value: value is None or allowed.accepts(value), allowed.names,
        allowed.nearest,
    )  # fmt: skip


def one_of(*names: str) -> Allowed:
    """One of some names."""
    return Allowed("one of " + ", ".join(map(repr, names)), lambda value: value in names, names)


def list_of(allowed: Allowed, text: str) -> Allowed:
    """Lists and tuples of values."""
    return Allowed(text, lambda value: isinstance(value, list | tuple) and all(map(allowed.accepts, value)))


FLAG = Allowed("True or False", lambda value: isinstance(value, bool))
DICT = Allowed("a dict", lambda value: isinstance(value, Mapping))
SHARE = number(0, 1, above=True)
WEIGHT = number(0, 1_000_000)
"""The weight of a part of a loss; 0 leaves the part out."""


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as Python's own numbers and lists, which all code that reads settings takes."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def faults_of(
    values: Mapping[str, Any], allowed: Mapping[str, Allowed], prefix: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """The faults of settings that have a rule, one text each.

    Args:
        prefix: before the name of the setting in the text.
        defaults: of the settings.
    """
    faults = [
        allowed[name].fault(f"{prefix}{name}", plain(value), (defaults or {}).get(name))
        for name, value in values.items()
        if name in allowed
    ]
    return [fault for fault in faults if fault is not None]


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
