"""`Silence`: measures how long engines and rewards have made no progress while the training loop waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["Silence"]

PROGRESS_EVERY_S = 30.0
"""Seconds between two queries of the engines' progress counters: a request may be a whole round."""
REVIVALS = 5
"""The most pushes to engines without weights that count as progress, if there is no answer between them."""


class Silence:
    """The time since engines or rewards last made progress.

    Args:
        progress: returns counters of the engines, which change while they sample. Waiting threads call it from time to
            time.
        deadline_s: seconds after which the caller gives up.
        clock: returns seconds.
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
        """Note that a wait begins: the time before it does not count."""
        self._began = self._looked = self._clock()

    def answered(self) -> None:
        """Note that an engine or a reward has answered."""
        self._moved, self._revivals = self._clock(), 0

    def lost(self) -> None:
        """Note that an engine has died, which counts as progress: repeated deaths end the run in another way."""
        self._moved = self._clock()

    def revived(self) -> None:
        """Note that weights were pushed to engines without weights; without answers, only `REVIVALS` pushes are
        progress."""
        self._revivals += 1
        if self._revivals <= REVIVALS:
            self._moved = self._clock()

    def look(self) -> None:
        """Query the engines' counters, if it is time."""
        if self._clock() - self._looked < self._every_s:
            return
        self._looked = self._clock()
        if (seen := dict(self._progress())) != self._seen:
            self._seen, self._moved = seen, self._clock()

    @property
    def seconds(self) -> float:
        """Seconds without progress in the present wait."""
        return self._clock() - max(self._began, self._moved)
