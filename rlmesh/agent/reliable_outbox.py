"""News for the master that must not be lost: kept until the master has said that it will not forget it.

Items are numbered and go out in order, in batches, one batch at a time. A batch that got no answer, because the
master died or stands still, is sent again until it got one; what the master had taken in already it knows by the
sender and the numbers. So each item arrives exactly once as long as its sender lives, whatever becomes of the master.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from typing import Any, Protocol

from rlmesh.errors import CallError, ShuttingDown
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle

__all__ = ["Outbox", "OutboxRuntime"]

logger = logging.getLogger(__name__)

BATCH = 1000
ANSWER_S = 10.0
RETRY_S = 0.05
MOST = 100_000
"""Items that are kept; with more the oldest are given up, since nobody has been there to take them for long."""


class OutboxRuntime(Protocol):
    """What an outbox needs of its runtime."""

    def post(self, fn: Any, *args: Any) -> None: ...


class Outbox:
    """One sender's news. ``put`` and ``drain`` are for any thread.

    Args:
        runtime: whose loop sends.
        master: takes ``deliver(sender, first, items)`` and answers with the number of the last item that it has.
        sender: a name that no other process of the job ever has.
    """

    def __init__(self, runtime: OutboxRuntime, master: MemberHandle, sender: str) -> None:
        self._runtime = runtime
        self._master = master.options(timeout_s=ANSWER_S, idempotent=True)
        self._sender = sender
        self._items: deque[object] = deque()
        self._first = 1
        """Number of the oldest item that is kept."""
        self._sending = False
        self._given_up = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: object) -> None:
        """Send it, now or when there is a master. Never waits."""
        with self._changed:
            if len(self._items) >= MOST:
                self._items.popleft()
                self._first += 1
                self._given_up += 1
                if self._given_up == 1:
                    logger.error("%s: %d items of news wait for the master; the oldest are lost", self._sender, MOST)
            self._items.append(item)
            if self._sending or self._closed:
                return
            self._sending = True
        self._runtime.post(self._send)

    def kept(self) -> tuple[object, ...]:
        """What the master has not confirmed."""
        with self._changed:
            return tuple(self._items)

    def drain(self, timeout_s: float) -> bool:
        """Block until the master has everything; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items, timeout_s)

    def close(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._closed = True

    # On the runtime's loop.

    def _send(self) -> None:
        with self._changed:
            first = self._first
            items = tuple(self._items[index] for index in range(min(BATCH, len(self._items))))
            if not items or self._closed:
                self._sending = False
                return
        answer = self._master.call("deliver", self._sender, first, items)
        answer.add_done_callback(self._answered)

    def _answered(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, ShuttingDown):
            self.close()  # this process is ending, or the job has ended
            return
        if error is not None:
            if not isinstance(error, CallError):
                logger.error("%s: the master could not take news: %s", self._sender, error)
            self._runtime.post(self._send_later)
            return
        last: int = answer.result()
        with self._changed:
            while self._items and self._first <= last:
                self._items.popleft()
                self._first += 1
            if not self._items:
                self._sending = False
                self._changed.notify_all()
                return
        self._runtime.post(self._send)

    def _send_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_S, self._send)
