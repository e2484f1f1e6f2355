"""Memory that nobody used for a while goes back to the system, while the runtime lives on.

A timer on the runtime's loop looks every half a minute; what takes long, giving pages back (0.2 s per GiB), runs on a
thread that lives for that moment only: a service that embeds a runtime keeps no thread of rlmesh's. The timer itself
runs only while there is shared memory.
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
    """What is looked after."""

    def is_empty(self) -> bool:
        """Nothing is held that could become idle."""
        ...

    def has_idle(self, idle_s: float) -> bool:
        """Is there something to give back? Quick."""
        ...

    def trim(self, idle_s: float) -> int:
        """Give it back; bytes. May take long."""
        ...


class Trimmer:
    """The timer of one runtime.

    Args:
        loop: the runtime's.
        post: runs a function on it, from any thread.
    """

    def __init__(self, held: Trimmed, loop: asyncio.AbstractEventLoop, post: Callable[..., None]) -> None:
        self._held, self._loop, self._post = held, loop, post
        self._wanted = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """There is something to look after. From any thread, as often as one likes."""
        if not self._wanted:
            self._wanted = True
            self._post(self._set_timer)

    def close(self) -> None:
        """On the loop; waits for what is being given back at this moment."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _set_timer(self) -> None:
        if not self._closed:
            self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._held.has_idle(IDLE_S):
            self._thread = threading.Thread(target=self._trim, name="rlmesh-trim", daemon=True)
            self._thread.start()
        else:
            self._looked()

    def _trim(self) -> None:
        try:
            nbytes = self._held.trim(IDLE_S)
            logger.debug("%d bytes of shared memory that were idle went back to the system", nbytes)
        finally:
            self._post(self._trimmed)

    def _trimmed(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_JOIN_S)
        self._looked()

    def _looked(self) -> None:
        # In this order: what is captured in between sets the timer again.
        self._wanted = False
        if not self._held.is_empty():
            self.want()
