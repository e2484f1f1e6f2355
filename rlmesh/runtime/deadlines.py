"""Many deadlines, one timer: keys in buckets of 20 ms, so that adding and removing cost the same at any number."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable

BUCKET_S = 0.02


class Deadlines:
    """Calls ``expired(key)`` on the loop, at most `BUCKET_S` late, for each key that was not removed before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[Hashable], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._buckets: dict[int, set[Hashable]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_bucket = 0

    def add(self, key: Hashable, at: float) -> int:
        """``at`` in the loop's time; gives the bucket, which `remove` wants back."""
        number = int(at / BUCKET_S) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = set()
            heapq.heappush(self._order, number)
        bucket.add(key)
        if self._timer is None or number < self._timer_bucket:
            self._schedule()
        return number

    def remove(self, key: Hashable, number: int) -> None:
        bucket = self._buckets.get(number)
        if bucket is not None:
            bucket.discard(key)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._buckets.clear()
        self._order.clear()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._order and not self._buckets.get(self._order[0]):
            self._buckets.pop(heapq.heappop(self._order), None)
        if self._order:
            self._timer_bucket = self._order[0]
            self._timer = self._loop.call_at(self._timer_bucket * BUCKET_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._order and self._order[0] * BUCKET_S <= now:
            for key in self._buckets.pop(heapq.heappop(self._order), set()):
                self._expired(key)
        self._schedule()
