"""`Allowed`: the values that a setting may have, in words and as a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np

from rlmesh.envs.environments.registry import did_you_mean

__all__ = [
    "DICT", "FLAG", "SHARE", "Allowed", "faults_of", "list_of", "number", "one_of", "optional", "plain", "schedule",
    "whole",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a setting may have.

    Attributes:
        text: the values in words, as errors say them.
        accepts: True for a value that is allowed; a value of a strange type may raise TypeError or ValueError.
        names: of settings that are a choice: the names, of which errors tell the nearest one.
    """

    text: str
    accepts: Callable[[Any], bool]
    names: tuple[str, ...] = ()

    def fault(self, name: str, value: Any) -> str | None:
        """The error text for a setting with a value that is not allowed; None for one that is."""
        try:
            if self.accepts(value):
                return None
        except (TypeError, ValueError):
            pass
        hint = f".{did_you_mean(str(value), self.names, listed=False)}" if self.names else ""
        return f"{name}: {self.text}, not {value!r}{hint}"


def whole(least: int) -> Allowed:
    """Whole numbers from ``least`` on."""
    return Allowed(f"a whole number of at least {least}", lambda value: _is(value, Integral) and value >= least)


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

    return Allowed(f"a number {text}", accepts)


def schedule(constant: Allowed, points: Allowed | None = None) -> Allowed:
    """A constant, or points ``[[0, value], [step, value], …]`` with growing steps, whose values are like it.

    Args:
        points: what values of points may be, if that differs.
    """

    def accepts(value: Any) -> bool:
        if constant.accepts(value):
            return True
        steps, values = zip(*value, strict=True)
        grows = steps[0] == 0 and all(a < b for a, b in pairwise(steps)) and math.isfinite(steps[-1])
        return grows and all(_is(step, Real) for step in steps) and all(map((points or constant).accepts, values))

    other = f" (value: {points.text})" if points else ""
    return Allowed(f"{constant.text}, or points [[0, value], [step, value], …]{other} with growing steps", accepts)


def optional(allowed: Allowed) -> Allowed:
    """The same values, and None."""
    return Allowed(f"{allowed.text}, or None", lambda value: value is None or allowed.accepts(value), allowed.names)


def one_of(*names: str) -> Allowed:
    """One of some names."""
    return Allowed("one of " + ", ".join(map(repr, names)), lambda value: value in names, names)


def list_of(allowed: Allowed, text: str) -> Allowed:
    """Lists and tuples of values."""
    return Allowed(text, lambda value: isinstance(value, list | tuple) and all(map(allowed.accepts, value)))


FLAG = Allowed("True or False", lambda value: isinstance(value, bool))
DICT = Allowed("a dict", lambda value: isinstance(value, Mapping))
SHARE = number(0, 1, above=True)


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as Python's own numbers and lists, which all code that reads settings takes."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def faults_of(
    values: Mapping[str, Any], allowed: Mapping[str, Allowed], names: Iterable[str] | None = None, prefix: str = ""
) -> list[str]:
    """The faults of settings that have a rule, one text each.

    Args:
        names: of these settings alone.
        prefix: before the name of the setting in the text.
    """
    chosen = [name for name in (values if names is None else names) if name in values and name in allowed]
    faults = [allowed[name].fault(f"{prefix}{name}", plain(values[name])) for name in chosen]
    return [fault for fault in faults if fault is not None]


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
