"""`Channel`: a link that sends the messages of one loop turn in one packet, and none before the handshake is over."""

from __future__ import annotations

import asyncio
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from rlmesh.memory.device import contents
from rlmesh.runtime.process import forked
from rlmesh.runtime.serving.reply_backlog import Backlog
from rlmesh.runtime.transport.base import Link
from rlmesh.wire.envelope import Call, Frames, Header, MakeRef, Message, pack
from rlmesh.wire.handshake import CallerHandshake, ListenerHandshake

_PACKET_MESSAGES = 1024
_FULL_TURN_MESSAGES = 64
"""A turn that has made this many messages sends them, so that the peer begins while the turn makes more."""

NORMAL_CALLS = 512
"""A method that runs more calls at once than this announces its number, and gets a wider window for it."""

turn_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Loops of rlmesh by their threads; the messages that such a thread sends in one turn leave together at its end."""
forked.reset_in_children(turn_loops.clear)


class MessageHolder(Protocol):
    def holds(self, header: Header, payload: Frames) -> bool:
        """Take a message that must wait for an earlier message; False if it need not wait."""
        ...


class Channel:
    """Sends messages from any thread, in each thread's order.

    A thread that runs one of rlmesh's loops sends what is ready in one turn as one packet, at the turn's end and
    never by a timer; a plain thread sends at once.
    """

    __slots__ = (
        "_lock", "_outbox", "_post", "_scheduled", "announced_calls", "authenticated", "backlog", "bulk_receiver",
        "divert", "handshake", "link", "make_ref", "peer_name", "unseal",
    )  # fmt: skip

    def __init__(self, link: Link, post: Callable[..., None]) -> None:
        self.link = link
        self.authenticated = False
        self.handshake: CallerHandshake | ListenerHandshake | None = None
        self.make_ref: MakeRef | None = None
        """Replaces frames by references to shared memory; set once the peer is known to share it."""
        self.divert: Callable[[Header, Frames], Header | None] | None = None
        """Sends large payloads over the bulk channel and returns the header to send instead; set once there is one."""
        self.bulk_receiver: MessageHolder | None = None
        """Holds the peer's messages whose payloads have not come yet, and the messages behind them."""
        self.unseal: Callable[[Frames], Frames] | None = None
        """Checks a packet and returns its frames; set for a connection that carries bulk payloads only."""
        self.backlog = Backlog()
        self.peer_name = link.peer
        self.announced_calls = NORMAL_CALLS
        """The number of calls of one method that may be on their way here, as last announced to the peer."""
        self._post = post
        self._outbox: deque[Message] = deque()
        self._scheduled: set[int] = set()
        self._lock = allocate_lock()

    def accept(self, peer_name: str) -> None:
        """Mark the peer as authenticated and send the messages that waited for that."""
        self.handshake = None
        self.peer_name = peer_name
        self.link.trust()
        self.authenticated = True
        self.flush()

    def send(self, header: Header, frames: Frames) -> None:
        self.put(header, frames)
        self.kick()

    def put(self, header: Header, frames: Frames) -> None:
        """Queue a message without sending it; `kick` must follow. For callers that hold a lock."""
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
        """Send the queue at once, for a message that no other will join in this turn."""
        if self.link.thread_safe:
            if self._outbox:
                self.flush()
        else:
            self.kick()

    def flush(self) -> None:
        with self._lock:
            if not self.authenticated:
                return  # `accept` sends what is queued.
            outbox = self._outbox
            while outbox:
                if len(outbox) == 1:
                    messages = [outbox.popleft()]
                else:
                    messages = [outbox.popleft() for _ in range(min(len(outbox), _PACKET_MESSAGES))]
                if self.make_ref is None:
                    # Without shared memory with the peer, references to GPU memory (tickets) are replaced by bytes.
                    messages = [(header, contents(f) if len(f) > 1 else f) for header, f in messages]
                if self.divert is not None and self.make_ref is None:
                    messages = [self._diverted(self.divert, *message) for message in messages]
                self.link.send(pack(messages, self.make_ref))

    @staticmethod
    def _diverted(divert: Callable[[Header, Frames], Header | None], header: Header, frames: Frames) -> Message:
        other = divert(header, frames)
        return (header, frames) if other is None else (other, [])

    def _flush_turn(self, thread: int) -> None:
        self._scheduled.discard(thread)
        self.flush()


class BulkHost(Protocol):
    """The runtime's methods that a bulk channel calls, on the loop."""

    def deliver(self, channel: Channel, header: Header, payload: Frames) -> None:
        """Handle a message that is complete now."""
        ...

    def order_of(self, call: Call) -> Hashable | None:
        """The key that calls share if they must start in the order they were made; None for a call without order."""
        ...
