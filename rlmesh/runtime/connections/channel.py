"""A link with what the protocol adds: messages of one loop turn in one packet, none before the greeting is over."""

from __future__ import annotations

import asyncio
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlmesh.memory.device import contents
from rlmesh.runtime.process import forked
from rlmesh.runtime.serving.reply_backlog import Backlog
from rlmesh.runtime.transport.base import Link
from rlmesh.wire.envelope import Frames, Header, Lend, Message, pack
from rlmesh.wire.greeting import Admission, Opening

if TYPE_CHECKING:
    from rlmesh.runtime.connections.bulk_channel import BulkReceiver

_PACKET_MESSAGES = 1024
_FULL_TURN_MESSAGES = 64
"""A turn that has made so many sends them, so that the peer begins while the turn makes more."""

NORMAL_ROOM = 512
"""A method that runs more calls at once than this says so, and gets a wider window for it."""

turn_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Threads that run a loop of rlmesh: what they send in one turn leaves together at the turn's end."""
forked.reset_in_children(turn_loops.clear)


class Channel:
    """Sends messages from any thread, in each thread's order.

    A thread that runs one of rlmesh's loops sends what is ready in one turn as one packet, at the turn's end and
    never by a timer; a plain thread sends at once.
    """

    __slots__ = (
        "_lock", "_outbox", "_post", "_scheduled", "authenticated", "backlog", "divert", "greeting", "incoming", "lend",
        "link", "peer_name", "room", "unseal",
    )  # fmt: skip

    def __init__(self, link: Link, post: Callable[..., None]) -> None:
        self.link = link
        self.authenticated = False
        self.greeting: Opening | Admission | None = None
        self.lend: Lend | None = None
        """Set once the peer is known to share this process's memory."""
        self.divert: Callable[[Header, Frames], Header | None] | None = None
        """Set once the peer takes large payloads another way: takes such a payload, gives what is sent instead."""
        self.incoming: BulkReceiver | None = None
        """What of the peer's messages waits for its payload."""
        self.unseal: Callable[[Frames], Frames] | None = None
        """Set for a connection that carries payloads only: gives the frames of a packet that the peer sent."""
        self.backlog = Backlog()
        self.peer_name = link.peer
        self.room = NORMAL_ROOM
        """So many calls of one method may be on their way here, as far as the peer was told."""
        self._post = post
        self._outbox: deque[Message] = deque()
        self._scheduled: set[int] = set()
        self._lock = allocate_lock()

    def accept(self, peer_name: str) -> None:
        """The peer has shown the job's key: what waited for that goes out."""
        self.greeting = None
        self.peer_name = peer_name
        self.link.trust()
        self.authenticated = True
        self.flush()

    def send(self, header: Header, frames: Frames) -> None:
        self.put(header, frames)
        self.kick()

    def put(self, header: Header, frames: Frames) -> None:
        """Queue a message without sending it yet; `kick` must follow. For callers that hold a lock."""
        self._outbox.append((header, frames))

    def kick(self) -> None:
        thread = threading.get_ident()
        if thread in self._scheduled:
            if len(self._outbox) >= _FULL_TURN_MESSAGES and self.link.thread_safe:
                self.flush()
            return
        loop = turn_loops.get(thread)
        if not self.link.thread_safe:
            self._scheduled.add(thread)
            self._post(self._flush_turn, thread)
        elif loop is not None:
            self._scheduled.add(thread)
            loop.call_soon(self._flush_turn, thread)
        else:
            self.flush()

    def hurry(self) -> None:
        """As `kick`, for a message that has no company to wait for."""
        if self.link.thread_safe:
            if self._outbox:
                self.flush()
        else:
            self.kick()

    def flush(self) -> None:
        with self._lock:
            if not self.authenticated:
                return  # Nothing is said to a stranger; `accept` sends what waits.
            outbox = self._outbox
            while outbox:
                if len(outbox) == 1:
                    messages = [outbox.popleft()]
                else:
                    messages = [outbox.popleft() for _ in range(min(len(outbox), _PACKET_MESSAGES))]
                if self.lend is None:
                    # The peer cannot open this node's shared memory, nor what tickets of device memory name.
                    messages = [(header, contents(f) if len(f) > 1 else f) for header, f in messages]
                if self.divert is not None and self.lend is None:
                    messages = [self._diverted(self.divert, *message) for message in messages]
                self.link.send(pack(messages, self.lend))

    @staticmethod
    def _diverted(divert: Callable[[Header, Frames], Header | None], header: Header, frames: Frames) -> Message:
        other = divert(header, frames)
        return (header, frames) if other is None else (other, [])

    def _flush_turn(self, thread: int) -> None:
        self._scheduled.discard(thread)
        self.flush()
