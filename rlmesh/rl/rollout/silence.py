"""`Silence`: measures for how long engines and rewards have done nothing, while the training loop waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["Silence"]

PROGRESS_EVERY_S = 30.0
"""Seconds after which a wait asks the engines whether they sample on: a request may be a whole round."""
REVIVALS = 5
"""Revivals of engines without any answer between them that count as progress."""


class Silence:
    """The time since engines or rewards last made progress.

    Args:
        progress: numbers of engines that change while they sample; called from waiting threads, at times.
        deadline_s: seconds after which the caller gives up.
        clock: seconds.
    """

    def __init__(
        self, progress: Callable[[], Mapping[int, int]], deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._progress, self._clock = progress, clock
        self._every_s = min(PROGRESS_EVERY_S, deadline_s / 4)
        self._seen: dict[int, int] = {}
        self._revivals = 0
        self._began = self._moved = self._looked = clock()

    def begin(self) -> None:
        """A wait begins: the time before it does not count."""
        self._began = self._looked = self._clock()

    def answered(self) -> None:
        """An engine or a reward has answered."""
        self._moved, self._revivals = self._clock(), 0

    def lost(self) -> None:
        """An engine has died; a run ends in another way if they do that again and again."""
        self._moved = self._clock()

    def revived(self) -> None:
        """Engines were given weights. It is no progress if they lose them again and again."""
        self._revivals += 1
        if self._revivals <= REVIVALS:
            self._moved = self._clock()

    def look(self) -> None:
        """Ask the engines, if it is time for that."""
        if self._clock() - self._looked < self._every_s:
            return
        self._looked = self._clock()
        if (seen := dict(self._progress())) != self._seen:
            self._seen, self._moved = seen, self._clock()

    @property
    def seconds(self) -> float:
        """Seconds of the present wait without any progress."""
        return self._clock() - max(self._began, self._moved)
