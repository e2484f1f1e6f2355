"""Deadlines of pending calls, in buckets that a tick of the loop empties; entries are added and removed cheaply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlmesh.runtime.process import clock

FINE_S = 0.02
COARSE_S = 1.0
_FINE_UP_TO_S = 10.0
_IDLE_TICK_S = 0.1


class DeadlineEntry(Protocol):
    deadline: float
    bucket: dict[int, DeadlineEntry] | None
    call_id: int


class _Wheel:
    """Deadline entries by the interval in which they expire."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self.buckets: dict[int, dict[int, DeadlineEntry]] = {}
        self.done = int(clock.now() / width_s)

    def expired(self, now: float) -> list[DeadlineEntry]:
        last = int(now / self.width_s)
        found: list[DeadlineEntry] = []
        for number in range(self.done + 1, last + 1):
            bucket = self.buckets.pop(number, None)
            if bucket:
                found += bucket.values()
        self.done = max(self.done, last)
        return found


class Deadlines:
    """Calls ``expired(entry)`` on the loop for each entry that was not removed in time.

    The call is late by at most two intervals: 0.04 s for deadlines up to 10 s away (0.14 s for the first one after a
    pause), 2 s for later deadlines. One tick serves all entries. Time in which the process was suspended does not
    count.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lock: AbstractContextManager[Any],
        expired: Callable[[DeadlineEntry], None],
    ) -> None:
        self._loop, self._lock, self._expired = loop, lock, expired
        clock.begin(loop)
        self._fine, self._coarse = _Wheel(FINE_S), _Wheel(COARSE_S)
        self._timer = loop.call_later(_IDLE_TICK_S, self._tick)
        self._closed = False

    def add(self, entry: DeadlineEntry, timeout_s: float) -> None:
        """Add an entry; the calling thread must hold the lock."""
        wheel = self._fine if timeout_s <= _FINE_UP_TO_S else self._coarse
        # At least one interval ahead of the tick, so that no entry is added to a bucket that is being emptied.
        number = int(entry.deadline / wheel.width_s) + 1
        if number < wheel.done + 2:
            number = wheel.done + 2
        bucket = wheel.buckets.get(number)
        if bucket is None:
            bucket = wheel.buckets[number] = {}
        bucket[entry.call_id] = entry
        entry.bucket = bucket

    @staticmethod
    def remove(entry: DeadlineEntry) -> None:
        if entry.bucket is not None:
            entry.bucket.pop(entry.call_id, None)
            entry.bucket = None

    def close(self) -> None:
        if not self._closed:
            clock.end(self._loop)
        self._closed = True
        self._timer.cancel()

    def _tick(self) -> None:
        clock.beat()
        now = clock.now()
        with self._lock:
            entries = self._fine.expired(now) + self._coarse.expired(now)
        for entry in entries:
            self._expired(entry)
        if not self._closed:
            pause_s = FINE_S if self._fine.buckets else _IDLE_TICK_S
            self._timer = self._loop.call_later(pause_s, self._tick)
