"""Nested values of environments: arrays in them, copies, differences, and what a space says against one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space as batch_space

from rlmesh.envs.multi_agent.environment import ALL

__all__ = ["Kept", "digest", "ended", "first_difference", "is_number", "short", "violations"]


def parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Arrays and scalars of nested dicts, lists and tuples, with their places as text."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from parts(below, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, below in enumerate(value):
            yield from parts(below, f"{place}[{position}]")
    elif isinstance(value, np.ndarray) and value.dtype == object:
        for position, below in enumerate(value.reshape(-1)):
            yield from parts(below, f"{place}[{position}]")
    else:
        yield place, value


def ended(flag: Any) -> bool:
    """True for a flag that ends an episode; of several agents, that of all of them."""
    return bool(flag.get(ALL, False) if isinstance(flag, Mapping) else flag)


def short(value: Any) -> str:
    """A value as text of one line and at most 80 characters."""
    text = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    return text if len(text) <= 80 else f"{text[:77]}…"


def is_number(value: Any) -> bool:
    """True for finite numbers of Python and NumPy, and arrays of one such number without dimensions."""
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iuf" and bool(np.isfinite(value))
    return isinstance(value, int | float | np.integer | np.floating) and bool(np.isfinite(value))


def same(left: Any, right: Any) -> bool:
    """True for equal scalars and arrays of equal dtype and shape; NaN equals NaN."""
    if isinstance(left, np.ndarray | np.generic) or isinstance(right, np.ndarray | np.generic):
        left, right = np.asarray(left), np.asarray(right)
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return left.tobytes() == right.tobytes() or bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fc"))
    if type(left) is not type(right):
        return False
    if isinstance(left, int | float | str | bytes | bool | None):
        return bool(left == right or (left != left and right != right))
    return True  # Objects of unknown types are not compared.


def first_difference(left: Any, right: Any, place: str) -> str | None:
    """The place and the values of the first difference of two nested values; None if there is none."""
    ours, theirs = dict(parts(left, place)), dict(parts(right, place))
    for where in ours.keys() | theirs.keys():
        if where not in ours or where not in theirs:
            return f"{where} is there only once"
    for where, value in ours.items():
        if not same(value, theirs[where]):
            return f"{where} is {short(value)}, then {short(theirs[where])}"
    return None


def digest(value: Any) -> str:
    """Text that is equal for equal nested values, also in another process; objects of unknown types do not count."""
    found = hashlib.sha256()
    for place, part in sorted(parts(value, ""), key=lambda item: item[0]):
        found.update(place.encode())
        if isinstance(part, np.ndarray | np.generic):
            array = np.asarray(part)
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        elif isinstance(part, int | float | str | bytes | bool | None):
            found.update(repr(part).encode())
    return found.hexdigest()


class Kept:
    """A returned value beside a copy of it, to find out whether somebody changes it later."""

    def __init__(self, value: Any, place: str, when: str) -> None:
        self.place, self.when = place, when
        self._parts = dict(parts(value, place))
        self._value = value
        self._copies = {where: _copied(part) for where, part in self._parts.items()}

    def changed(self) -> str | None:
        """The place of the first part that is no longer what it was; None if nothing has changed."""
        now = dict(parts(self._value, self.place))
        if now.keys() != self._copies.keys():
            return min(now.keys() ^ self._copies.keys())
        return next((where for where, copied in self._copies.items() if not same(now[where], copied)), None)


def _copied(part: Any) -> Any:
    return part.copy() if isinstance(part, np.ndarray) else copy.copy(part) if isinstance(part, np.generic) else part


def violations(space: Any, value: Any, place: str) -> Iterator[tuple[str, str, str]]:
    """The faults of a value that is not in a space: check, place and fault, one for each part."""
    if isinstance(space, spaces.Dict):
        yield from _dict_violations(space, value, place)
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            yield "observation", place, f"{short(value)} is not a tuple of {len(space.spaces)} parts"
        else:
            for position, (below, part) in enumerate(zip(space.spaces, value, strict=True)):
                yield from violations(below, part, f"{place}[{position}]")
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        yield from _array_violations(space, value, place)
    elif not space.contains(value):
        yield "observation", place, f"{short(value)} is not in {space}"


def _dict_violations(space: spaces.Dict, value: Any, place: str) -> Iterator[tuple[str, str, str]]:
    if not isinstance(value, Mapping):
        yield "observation", place, f"{short(value)} is not a dict, as {short(space)} wants"
        return
    if value.keys() != space.spaces.keys():
        missing, more = space.spaces.keys() - value.keys(), value.keys() - space.spaces.keys()
        yield "observation", place, f"the keys differ from the space's: missing {sorted(missing)}, more {sorted(more)}"
    for key, below in space.spaces.items():
        if key in value:
            yield from violations(below, value[key], f"{place}[{key!r}]")


def _array_violations(space: Any, value: Any, place: str) -> Iterator[tuple[str, str, str]]:
    if not isinstance(value, np.ndarray | np.generic):
        yield "dtype", place, f"{short(value)} is a {type(value).__name__}, not a NumPy array of {space.dtype}"
        return
    if value.shape != space.shape:
        yield "observation", place, f"the shape is {list(value.shape)}, but the space's is {list(space.shape)}"
        return
    if value.dtype != space.dtype:
        yield "dtype", place, f"the dtype is {value.dtype}, but the space's is {space.dtype}"
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    else:
        low, high = np.zeros(space.shape), np.ones(space.shape)
    array = np.asarray(value)
    bad = np.argwhere(~((array >= low) & (array <= high)))
    if len(bad):
        at = tuple(int(number) for number in bad[0])
        index = "".join(f"[{number}]" for number in at)
        more = f", and {len(bad) - 1} more elements are outside" if len(bad) > 1 else ""
        yield "observation", f"{place}{index}", f"{array[at]} is not from {low[at]} to {high[at]}{more}"
