"""Reports to the master that must not be lost: each is stored until the master has confirmed it.

Items are numbered and sent in order, in batches, one batch at a time. A batch without an answer, because the
master died or stands still, is sent again; the master recognises items that it has already by the sender and the
numbers. So each item arrives exactly once while its sender lives, whatever happens to the master.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections import deque
from typing import Any, Protocol

from rlmesh.errors import CallError, ShuttingDown
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle

__all__ = ["Outbox", "OutboxRuntime", "new_sender"]

logger = logging.getLogger(__name__)

BATCH = 1000
ANSWER_S = 10.0
RETRY_S = 0.05
MOST = 100_000
"""Items that are stored; beyond that the oldest are dropped, since nobody has taken them for long."""


def new_sender(name: str) -> str:
    """A name that no other process of the job ever has. The process number alone is not enough: in containers, the
    agents of a node and of its replacement often have the same one."""
    return f"{name}/{os.getpid()}-{secrets.token_hex(4)}"


class OutboxRuntime(Protocol):
    """The part of the runtime that an outbox uses."""

    def post(self, fn: Any, *args: Any) -> None: ...


class Outbox:
    """The reports of one sender. ``put`` and ``drain`` can be called from any thread.

    Args:
        runtime: the runtime whose loop sends.
        master: serves ``deliver(sender, first, items)``, which returns the number of the last item that it has.
        sender: the name of this process, as of `new_sender`.
    """

    def __init__(self, runtime: OutboxRuntime, master: MemberHandle, sender: str) -> None:
        self._runtime = runtime
        self._master = master.options(timeout_s=ANSWER_S, idempotent=True)
        self._sender = sender
        self._items: deque[object] = deque()
        self._first = 1
        """Number of the oldest stored item."""
        self._sending = False
        self._given_up = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: object) -> None:
        """Send an item, now or when there is a master. Never waits."""
        with self._changed:
            if len(self._items) >= MOST:
                self._items.popleft()
                self._first += 1
                self._given_up += 1
                if self._given_up == 1:
                    logger.error("%s: %d reports wait for the master; the oldest are lost", self._sender, MOST)
            self._items.append(item)
            if self._sending or self._closed:
                return
            self._sending = True
        self._runtime.post(self._send)

    def unconfirmed(self) -> tuple[object, ...]:
        """The items that the master has not confirmed."""
        with self._changed:
            return tuple(self._items)

    def drain(self, timeout_s: float) -> bool:
        """Block until the master has confirmed all items, at most ``timeout_s`` seconds; return True if it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items, timeout_s)

    def close(self) -> None:
        """Stop sending."""
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
                logger.error("%s: the master could not take reports: %s", self._sender, error)
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
