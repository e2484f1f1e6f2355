"""Limits the number and the age of connections whose peers have not proved the job's key yet."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Generic, TypeVar

from rlmesh.runtime.process import clock

T = TypeVar("T")

SOFT_LIMIT = 128
"""With more connections, those that are older than `GRACE_S` are closed."""
HARD_LIMIT = 1024
"""With more connections (or more than a quarter of the descriptors that this process may open) the oldest is closed at
once. The limit is not smaller, since all of a job's members may connect at the same moment."""
GRACE_S = 1.0
TIMEOUT_S = 10.0


class HalfOpen(Generic[T]):
    """Closes connections of silent strangers, so that they do not use up the descriptors.

    Args:
        loop: runs the timer; all methods are called on it.
        evict: closes a connection; it may call `discard`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, evict: Callable[[T, str], None]) -> None:
        self._loop, self._evict = loop, evict
        self._since: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._hard_limit = HARD_LIMIT if soft == resource.RLIM_INFINITY else max(SOFT_LIMIT, min(HARD_LIMIT, soft // 4))

    def __len__(self) -> int:
        return len(self._since)

    def add(self, connection: T) -> None:
        self._since[connection] = clock.now()
        if len(self._since) > self._hard_limit:
            self.evict_oldest()
        self._arm()

    def discard(self, connection: T) -> None:
        """Forget a connection that is authenticated or gone."""
        self._since.pop(connection, None)

    def evict_oldest(self) -> bool:
        """Close the oldest connection; False if there is none."""
        oldest = next(iter(self._since), None)
        if oldest is None:
            return False
        del self._since[oldest]
        self._evict(oldest, f"it did not show the job's key and {len(self._since)} more connections were waiting")
        return True

    def close(self) -> None:
        self._since.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._since:
            oldest = next(iter(self._since.values()))
            limit_s = GRACE_S if len(self._since) > SOFT_LIMIT else TIMEOUT_S
            # Check again after `GRACE_S` at the latest: if more connections come, the shorter limit applies to all.
            left_s = min(oldest + limit_s - clock.now(), GRACE_S)
            self._timer = self._loop.call_later(max(left_s, 0.01), self._check)

    def _check(self) -> None:
        self._timer = None
        now = clock.now()
        while self._since:
            connection, since = next(iter(self._since.items()))
            limit_s = GRACE_S if len(self._since) > SOFT_LIMIT else TIMEOUT_S
            if now - since < limit_s:
                break
            del self._since[connection]
            self._evict(connection, f"it did not show the job's key within {limit_s:g} s")
        self._arm()
