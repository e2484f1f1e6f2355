"""Preallocated columns of a ring buffer: one array per leaf of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh.envs.environments.features import whole_numbers
from rlmesh.errors import UsageError

__all__ = ["ColumnStore", "Columns", "Leaf", "leaves", "nested", "spoken"]

Leaf = tuple[str | int, ...]
"""The place of an array in a batch: the column's name, then keys of dicts and positions in tuples."""

Columns = Mapping[str, Any]
"""Arrays [rows, …] by column name; dict and tuple observations are dicts and tuples of such arrays."""


def leaves(columns: Columns) -> Iterator[tuple[Leaf, NDArray[Any]]]:
    """Each array of a batch with its place."""
    for name, value in columns.items():
        yield from _leaves((name,), value)


def _leaves(place: Leaf, value: Any) -> Iterator[tuple[Leaf, NDArray[Any]]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves((*place, key), below)
    elif isinstance(value, tuple):
        for position, below in enumerate(value):
            yield from _leaves((*place, position), below)
    else:
        yield place, np.asarray(value)


def nested(flat: Mapping[Leaf, Any]) -> dict[str, Any]:
    """The batch whose arrays have these places; the inverse of `leaves`."""
    grouped: dict[str | int, dict[Leaf, Any]] = {}
    for (head, *rest), value in flat.items():
        grouped.setdefault(head, {})[tuple(rest)] = value
    return {str(head): _value(below) for head, below in grouped.items()}


def _value(below: dict[Leaf, Any]) -> Any:
    if () in below:
        return below[()]
    grouped: dict[str | int, dict[Leaf, Any]] = {}
    for (head, *rest), value in below.items():
        grouped.setdefault(head, {})[tuple(rest)] = value
    if all(isinstance(head, int) for head in grouped):
        return tuple(_value(grouped[position]) for position in range(len(grouped)))
    return {head: _value(value) for head, value in grouped.items()}


def spoken(place: Leaf) -> str:
    """A place as text: ``obs['camera'][0]``."""
    return str(place[0]) + "".join(f"[{key!r}]" for key in place[1:])


class ColumnStore:
    """Rows of a ring, column by column. The first rows that are written fix columns, shapes and dtypes.

    Memory is allocated at once for all rows; the operating system provides its pages as rows are written.

    Args:
        capacity: number of rows.
        ignored: columns that are not stored.
    """

    def __init__(self, capacity: int, ignored: tuple[str, ...] = ()) -> None:
        self.capacity = capacity
        self.arrays: dict[Leaf, NDArray[Any]] = {}
        self._ignored = ignored

    def checked(self, columns: Columns) -> tuple[dict[Leaf, NDArray[Any]], int]:
        """The arrays that are stored of a batch, and its number of rows.

        Raises:
            UsageError: columns are missing or unknown, or have another length, shape or kind of number than before.
        """
        rows = {place: array for place, array in leaves(columns) if place[0] not in self._ignored}
        if not rows:
            raise UsageError("replay: the batch has no columns; give at least obs, actions and rewards")
        lengths = {spoken(place): len(array) if array.ndim else -1 for place, array in rows.items()}
        count = next(iter(lengths.values()))
        if len(set(lengths.values())) > 1 or count < 0:
            raise UsageError(f"replay: all columns need the same number of rows, but have {lengths}")
        if self.arrays:
            self._compare(rows)
        return rows, count

    def _compare(self, rows: dict[Leaf, NDArray[Any]]) -> None:
        if rows.keys() != self.arrays.keys():
            missing = sorted(spoken(place) for place in self.arrays.keys() - rows.keys())
            unknown = sorted(spoken(place) for place in rows.keys() - self.arrays.keys())
            raise UsageError(
                f"replay: the batch has other columns than the first one: missing {missing}, new {unknown}. Give every "
                "batch the same columns, or name those to leave out in `ignored`"
            )
        for place, array in rows.items():
            stored = self.arrays[place]
            if array.shape[1:] != stored.shape[1:] or not np.can_cast(array.dtype, stored.dtype, "same_kind"):
                raise UsageError(
                    f"replay: rows of {spoken(place)} are {array.dtype}{list(array.shape[1:])}, but those of the first "
                    f"batch were {stored.dtype}{list(stored.shape[1:])}"
                )
            if array.dtype != stored.dtype and whole_numbers(array, stored.dtype) is None:
                raise UsageError(
                    f"replay: {spoken(place)} has numbers that do not fit {stored.dtype}, the type of the first batch"
                )

    def write(self, first: int, rows: Mapping[Leaf, NDArray[Any]], count: int) -> None:
        """Copy at most ``capacity`` rows to the ring, from position ``first`` on."""
        if not self.arrays:
            self.arrays = {
                place: np.zeros((self.capacity, *array.shape[1:]), array.dtype) for place, array in rows.items()
            }
        head = min(count, self.capacity - first)
        for place, stored in self.arrays.items():
            stored[first : first + head] = rows[place][:head]
            if head < count:
                stored[: count - head] = rows[place][head:]

    def read(self, positions: NDArray[np.int64], of: tuple[str, ...] | None = None) -> dict[Leaf, NDArray[Any]]:
        """Copies of rows, in the shape of ``positions``, of all columns or of those named."""
        return {
            place: np.take(stored, positions, axis=0)
            for place, stored in self.arrays.items()
            if of is None or place[0] in of
        }
