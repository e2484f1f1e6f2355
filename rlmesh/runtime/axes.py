"""Named axes of a role: the ranks that belong together. No I/O.

A role with ``dp=2, tp=4`` has eight members, numbered with the last axis running fastest: rank 5 is ``dp=1, tp=1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from rlmesh.errors import UsageError


@dataclass(frozen=True, slots=True)
class Axes:
    """Names and sizes of a role's axes, slowest first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Axes:
        """Check sizes and make axes of them.

        Raises:
            UsageError: a size is not a whole number above 0, or there is no axis.
        """
        if not sizes:
            raise UsageError("mesh(): name at least one axis, such as mesh(dp=2, tp=4)")
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise UsageError(f"mesh({name}={size!r}): the size of an axis is a whole number above 0")
        return cls(tuple(sizes), tuple(sizes.values()))

    @property
    def size(self) -> int:
        """The number of members of the role."""
        return prod(self.sizes)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a member on each axis.

        Raises:
            UsageError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is outside of {self}, which has {self.size} members")
        found: list[int] = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return dict(zip(self.names, reversed(found), strict=True))

    def rank(self, at: Mapping[str, int]) -> int:
        """The rank at these coordinates; the coordinate on other axes is 0.

        Raises:
            UsageError: an axis or a coordinate does not exist.
        """
        self._check(at)
        rank = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            rank = rank * size + at.get(name, 0)
        return rank

    def along(self, axes: tuple[str, ...], at: Mapping[str, int]) -> tuple[int, ...]:
        """The ranks that differ on ``axes`` only, in ascending order.

        Args:
            axes: the axes to go along, one or more.
            at: coordinates on the other axes; 0 where none is given.

        Raises:
            UsageError: an axis or a coordinate does not exist, or an axis is in both arguments.
        """
        if not axes or not all(isinstance(name, str) for name in axes):
            raise UsageError(f"along(): name an axis of {self}, not {', '.join(map(repr, axes)) or 'nothing'}")
        for name, place in at.items():
            if type(place) is not int:
                raise UsageError(f"along({name}={place!r:.80}): a coordinate is a whole number")
        self._check({**at, **dict.fromkeys(axes, 0)})
        if both := sorted(set(axes) & set(at)):
            raise UsageError(f"along(): {both[0]} is both an axis to go along and a fixed coordinate")
        ranges = [
            range(size) if name in axes else (at.get(name, 0),)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return tuple(self.rank(dict(zip(self.names, place, strict=True))) for place in product(*ranges))

    def _check(self, at: Mapping[str, int]) -> None:
        for name, place in at.items():
            if name not in self.names:
                import difflib

                near = difflib.get_close_matches(name, self.names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"there is no axis {name!r} in {self}{hint}")
            size = self.sizes[self.names.index(name)]
            if not 0 <= place < size:
                raise UsageError(f"{name}={place} is outside of {self}")
