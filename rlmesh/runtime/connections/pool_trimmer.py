"""Gives idle shared memory back to the system while the runtime runs.

A timer on the runtime's loop checks every half minute. Freeing pages takes long (0.2 s per GiB), so it runs on a thread
that is started for it and ends with it: a service that embeds a runtime keeps no thread of rlmesh. The timer runs only
while there is shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

EVERY_S = 30.0
IDLE_S = 60.0
_JOIN_S = 5.0


class Trimmed(Protocol):
    """The memory that a `PoolTrimmer` trims."""

    def is_empty(self) -> bool:
        """True if there is no memory that could become idle."""
        ...

    def has_idle(self, idle_s: float) -> bool:
        """True if `trim` would free memory. Quick."""
        ...

    def trim(self, idle_s: float) -> int:
        """Free memory that has been idle for ``idle_s``, and return its bytes. May take long."""
        ...


class PoolTrimmer:
    """The timer of a runtime.

    Args:
        loop: the runtime's loop.
        post: runs a function on the loop, from any thread.
    """

    def __init__(self, memory: Trimmed, loop: asyncio.AbstractEventLoop, post: Callable[..., None]) -> None:
        self._memory, self._loop, self._post = memory, loop, post
        self._started = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the timer unless it runs. Thread-safe; called whenever memory comes into use."""
        if not self._started:
            self._started = True
            self._post(self._set_timer)

    def close(self) -> None:
        """Stop the timer, and wait for a trim that is running. Runs on the loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _set_timer(self) -> None:
        if not self._closed:
            self._timer = self._loop.call_later(EVERY_S, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._memory.has_idle(IDLE_S):
            self._thread = threading.Thread(target=self._trim, name="rlmesh-trim", daemon=True)
            self._thread.start()
        else:
            self._checked()

    def _trim(self) -> None:
        try:
            nbytes = self._memory.trim(IDLE_S)
            logger.debug("%d bytes of idle shared memory went back to the system", nbytes)
        finally:
            self._post(self._trimmed)

    def _trimmed(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_S)
        self._checked()

    def _checked(self) -> None:
        # The flag is cleared first, so that memory that comes into use meanwhile starts the timer again.
        self._started = False
        if not self._memory.is_empty():
            self.start()
