"""Lines of many members as one stream, in which equal lines of several members are shown once. No I/O.

A line that repeats itself at one member, or that other members of its role print too, is folded while its window
lasts: the first appearance is shown at once, the others are counted and shown when the window ends, with all ranks::

    ACTOR:0-7 | loading shard  (8 times)

The k-th appearance of a text at one member is folded with the k-th at other members, never with an earlier one of its
own, so that a traceback keeps all its lines. Lines of one member stay in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlmesh.placement.binding import ranges

__all__ = ["Folding", "ranks_text"]

WINDOW_S = 1.0
WINDOW_KEYS = 20_000
"""Different lines after which a window ends early, so that a flood does not fill the memory."""


@dataclass(slots=True)
class _Fold:
    role: str
    text: str
    ranks: dict[str, int] = field(default_factory=dict)
    """Rank → number of appearances that are not shown yet."""
    shown: bool = False


class Folding:
    """One stream. Names are ``ROLE:rank``; times are seconds of any monotonic clock."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._ends_at: float | None = None
        self._folds: dict[tuple[str, str, int], _Fold] = {}
        self._appeared: dict[tuple[str, str], int] = {}
        self._last: dict[str, tuple[str, str, int]] = {}

    def take(self, lines: Iterable[tuple[str, str]], now: float) -> list[str]:
        """Add lines as (name, text); return the lines to show, as ``NAME | text``."""
        shown: list[str] = []
        if self._ends_at is not None and now >= self._ends_at:
            shown += self.finish()
        fresh: list[_Fold] = []
        for name, text in lines:
            if self._ends_at is None:
                self._ends_at = now + self._window_s
            fold = self._fold_of(name, text)
            rank = name.rpartition(":")[2]
            fold.ranks[rank] = fold.ranks.get(rank, 0) + 1
            if not fold.shown:
                fold.shown = True
                fresh.append(fold)
            if len(self._folds) > WINDOW_KEYS:
                shown += _shown(fresh)
                fresh.clear()
                shown += self.finish()
        return shown + _shown(fresh)

    def finish(self) -> list[str]:
        """End the window; return the counted lines that were not shown."""
        left = _shown([fold for fold in self._folds.values() if fold.ranks])
        self._folds.clear()
        self._appeared.clear()
        self._last.clear()
        self._ends_at = None
        return left

    def _fold_of(self, name: str, text: str) -> _Fold:
        role = name.rpartition(":")[0]
        last = self._last.get(name)
        if last is None or last[1] != text:
            appeared = self._appeared.get((name, text), 0)
            self._appeared[name, text] = appeared + 1
            last = self._last[name] = (role, text, appeared)
        fold = self._folds.get(last)
        if fold is None:
            fold = self._folds[last] = _Fold(role, text)
        return fold


def _shown(folds: Iterable[_Fold]) -> list[str]:
    lines = []
    for fold in folds:
        times = sum(fold.ranks.values())
        lines.append(
            f"{fold.role}:{ranks_text(fold.ranks)} | {fold.text}" + (f"  ({times} times)" if times > 1 else "")
        )
        fold.ranks = {}
    return lines


def ranks_text(names: Iterable[str]) -> str:
    """Format ranks as ``0-3,7``, in order, neighbours joined; texts that are not numbers stay as they are."""
    names = list(names)
    numbers = ranges([int(name) for name in names if name.isdigit()])
    return ",".join([*(name for name in names if not name.isdigit()), *filter(None, [numbers])])
