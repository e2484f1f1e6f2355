"""Actions as rows of one array, and in the structure of their space, as environments take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlmesh.envs.environments.features import characters_of
from rlmesh.errors import UsageError

__all__ = ["ActionRows", "action_width"]

ROW_TYPE = np.float64
"""The type of the elements of composed actions."""
MOST = 2**53
"""The largest number up to which all whole numbers are such elements."""
Reader = Callable[[np.ndarray], Any]


class ActionRows:
    """The form in which actions of a space are stored: rows of one array.

    Box, Discrete, MultiDiscrete and MultiBinary actions are stored as they are. Actions of Dict, Tuple, OneOf and Text
    are vectors of float64, in which bounds and numbers of choices are exact: the elements of their parts one after the
    other. Of OneOf, the first element is the number of the part, and all parts follow; of Text, it is the length, and
    ``max_length`` places of characters follow.

    Attributes:
        shape, dtype: shape and element type of a row.
        is_plain: False for spaces whose actions are vectors of their parts.

    Raises:
        UsageError: the space has no bound on the size of its actions (Sequence, Graph), is none of Gymnasium's, or is
            composed of parts with whole numbers beyond 2⁵³.
    """

    def __init__(self, space: Any) -> None:
        from gymnasium import spaces

        self.space = space
        self.is_plain = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        if self.is_plain:
            self.shape, self.dtype = tuple(space.shape or ()), np.dtype(space.dtype)
            self._is_discrete = isinstance(space, spaces.Discrete)
        else:
            self.shape, self.dtype = (action_width(space),), np.dtype(ROW_TYPE)
            self._read = _reader(space)

    def empty(self, *shape: int) -> np.ndarray:
        """An array of zeros for ``[*shape, *row]``."""
        return np.zeros((*shape, *self.shape), self.dtype)

    def to_env(self, rows: np.ndarray) -> Sequence[Any]:
        """The actions of rows ``[environments, …]``, one for each environment, in memory of their own."""
        if not self.is_plain:
            return [self._read(row) for row in rows]
        if self._is_discrete:
            return list(rows)
        found = rows.astype(self.dtype)
        return list(found) if self.shape else [np.asarray(each) for each in found]

    def to_rows(self, actions: Any) -> np.ndarray:
        """Rows of actions that are given as rows, or, of composed spaces, as a list in the space's structure."""
        if self.is_plain or isinstance(actions, np.ndarray):
            return np.asarray(actions)
        rows = self.empty(len(actions))
        for row, action in zip(rows, actions, strict=True):
            row[:] = _flat(self.space, action)
        return rows


def action_width(space: Any) -> int:
    """Number of elements of an action's row."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return math.prod(space.shape or ())
    if isinstance(space, spaces.Text):
        return 1 + int(space.max_length)
    if isinstance(space, spaces.OneOf):
        return 1 + sum(map(action_width, space.spaces))
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(map(action_width, _parts(space)))
    if isinstance(space, spaces.Sequence | spaces.Graph):
        raise UsageError(
            f"no action can be chosen in {space}: nothing bounds its length. Use a Tuple of as many parts as an action "
            "may have, with a Discrete part for their number, or Text for characters"
        )
    raise UsageError(f"the action space {space} is none of Gymnasium's")


def _parts(space: Any) -> list[Any]:
    from gymnasium import spaces

    return list(space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces)


def _reader(space: Any) -> Reader:
    """The function from an action's row to the action."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        ends = np.array([np.ravel(space.start), np.ravel(space.start) + np.ravel(_sizes(space)) - 1])
        _require_exact(space, ends)
    elif isinstance(space, spaces.Box) and space.dtype.kind in "iu":
        _require_exact(space, np.array([space.low, space.high]))
    if isinstance(space, spaces.Discrete):
        return lambda row: space.dtype.type(row[0])
    if isinstance(space, spaces.Text):
        characters = characters_of(space)
        return lambda row: "".join(characters[int(i)] for i in row[1 : 1 + int(row[0])])
    if not isinstance(space, spaces.Dict | spaces.Tuple | spaces.OneOf):
        return lambda row: row.reshape(space.shape).astype(space.dtype)
    is_choice = isinstance(space, spaces.OneOf)
    readers = [_reader(each) for each in _parts(space)]
    edges = np.cumsum([int(is_choice), *map(action_width, _parts(space))]).tolist()

    def part(row: np.ndarray, i: int) -> Any:
        return readers[i](row[edges[i] : edges[i + 1]])

    if is_choice:
        return lambda row: (np.int64(row[0]), part(row, int(row[0])))
    if isinstance(space, spaces.Dict):
        return lambda row: {key: part(row, i) for i, key in enumerate(space.spaces)}
    return lambda row: tuple(part(row, i) for i in range(len(readers)))


def _sizes(space: Any) -> Any:
    return space.n if hasattr(space, "n") else space.nvec


def _require_exact(space: Any, ends: np.ndarray) -> None:
    if any(abs(int(end)) > MOST for end in ends.ravel()):
        raise UsageError(f"{space}, which is a part of the action space, has numbers beyond 2⁵³; begin at 0")


def _flat(space: Any, action: Any) -> np.ndarray:
    """The row of an action; the inverse of `_reader`."""
    from gymnasium import spaces

    row = np.zeros(action_width(space), ROW_TYPE)
    if isinstance(space, spaces.Text):
        row[0] = len(action)
        characters = characters_of(space)
        row[1 : 1 + len(action)] = [characters.index(each) for each in action]
    elif isinstance(space, spaces.OneOf):
        which = int(action[0])
        parts = [_flat(each, action[1]) if i == which else _any(each) for i, each in enumerate(space.spaces)]
        row[:] = np.concatenate([[which], *parts])
    elif isinstance(space, spaces.Dict):
        row[:] = np.concatenate([_flat(each, action[key]) for key, each in space.spaces.items()])
    elif isinstance(space, spaces.Tuple):
        row[:] = np.concatenate([_flat(each, part) for each, part in zip(space.spaces, action, strict=True)])
    else:
        row[:] = np.asarray(action).ravel()
    return row


def _any(space: Any) -> np.ndarray:
    """The row of some action of a space, for a part of OneOf that is not chosen."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return np.ravel(space.start).astype(ROW_TYPE)
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape), space.low, space.high).ravel().astype(ROW_TYPE)
    row = np.zeros(action_width(space), ROW_TYPE)
    if isinstance(space, spaces.Text):
        row[0] = space.min_length
    elif not isinstance(space, spaces.MultiBinary):
        parts = list(map(_any, _parts(space)))
        row[:] = np.concatenate([[0], *parts] if isinstance(space, spaces.OneOf) else parts)
    return row
