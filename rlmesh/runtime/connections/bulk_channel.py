"""Both halves of a bulk channel: large payloads take a second connection, so that small messages do not wait for them.

A message with a large payload is sent as `Detached`: its header goes with the other messages, in order; its payload
follows over the bulk channel. The receiver holds the message until its payload has come. Messages that must not
overtake it wait behind it (later calls for the same queue of the same member, later answers to the same call); all
other messages are handled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from rlmesh.errors import MalformedFrame, PayloadTooLarge
from rlmesh.runtime.connections.channel import BulkHost, Channel
from rlmesh.runtime.process import clock
from rlmesh.runtime.transport.base import PACKET_LIMIT_BYTES
from rlmesh.runtime.transport.receive_buffers import allocate
from rlmesh.wire.envelope import (
    Buffer,
    Bulk,
    BulkPart,
    Call,
    Cancel,
    Credit,
    Detached,
    Frames,
    Header,
    Item,
    Keep,
    Reply,
    detach,
    pack,
    reattach,
)

_TURN_BYTES = 4 << 20


class BulkLink(Protocol):
    """The sink of a bulk channel's packets: a connection, or a wrapper around one."""

    @property
    def chunk_bytes(self) -> int | None:
        """The largest part of a payload that may be sent at once; None: no limit."""
        ...

    def send(self, frames: Frames) -> None: ...


class BulkSender:
    """The sending half.

    Args:
        threshold_bytes: payloads of at least this size take the bulk channel.
        loop: the runtime's loop.
        post: runs a function on the loop, from any thread.
        open_channel: called on the loop when the first payload waits for a bulk channel.
    """

    def __init__(
        self, threshold_bytes: int, loop: asyncio.AbstractEventLoop, post: Callable[..., None],
        open_channel: Callable[[], None],
    ) -> None:  # fmt: skip
        self._threshold_bytes, self._loop, self._post, self._open_lane = threshold_bytes, loop, post, open_channel
        self._numbers = itertools.count(1)
        self._queue: deque[tuple[int, Frames]] = deque()
        self._link: BulkLink | None = None
        self._packets: Iterator[Frames] = iter(())
        self._asked = self._busy = False

    def divert(self, header: Header, payload: Frames) -> Detached | None:
        """Take a large payload and return the message to send instead; None if the payload is small. Thread-safe."""
        if not payload or sum(len(frame) for frame in payload) < self._threshold_bytes:
            return None
        number = next(self._numbers)
        self._queue.append((number, payload))
        self._post(self._push)
        return detach(header, number)

    def open(self) -> None:
        """Open the bulk channel unless that was asked for already."""
        if not self._asked:
            self._asked = True
            self._open_lane()

    def opened(self, link: BulkLink) -> None:
        self._asked = True
        self._link = link
        self._push()

    def _push(self) -> None:
        if self._link is None:
            self.open()
            return
        if not self._busy:
            self._busy = True
            self._send_some(self._link)

    def _send_some(self, link: BulkLink) -> None:
        """Send a few packets, then let the loop do other work before the next packets."""
        left = _TURN_BYTES
        while left > 0:
            packet = next(self._packets, None)
            if packet is not None:
                link.send(packet)
                left -= len(packet[-1])
            elif self._queue:
                self._packets = _packets(*self._queue.popleft(), link.chunk_bytes)
            else:
                self._busy = False
                return
        self._loop.call_soon(self._send_some, link)


def _packets(number: int, payload: Frames, chunk_bytes: int | None) -> Iterator[Frames]:
    views = [memoryview(frame).cast("B") for frame in payload]
    sizes = tuple(view.nbytes for view in views)
    if chunk_bytes is None or sum(sizes) <= chunk_bytes:
        yield pack([(Bulk(number, sizes), list(views))])
        return
    yield pack([(Bulk(number, sizes), [])])
    for view in views:
        for at in range(0, view.nbytes, chunk_bytes):
            yield pack([(BulkPart(number), [view[at : at + chunk_bytes]])])


class _Assembly:
    """A payload that comes in parts."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        try:
            self.frames: Frames = [allocate(size) for size in sizes]
        except MemoryError:
            raise PayloadTooLarge(f"this process has no memory for a payload of {sum(sizes):,} bytes") from None
        self._views = [memoryview(frame) for frame in self.frames]
        self._frame, self._at = 0, 0
        self._skip_full()

    def add(self, part: Buffer) -> bool:
        """Add a part; True once the payload is complete.

        Raises:
            MalformedFrame: the part is too large.
        """
        size = len(part)
        if self._frame == len(self.frames) or self._at + size > len(self.frames[self._frame]):
            raise MalformedFrame(f"a part of {size} bytes is more than its payload still lacks")
        self._views[self._frame][self._at : self._at + size] = part
        self._at += size
        self._skip_full()
        return self._frame == len(self.frames)

    def _skip_full(self) -> None:
        while self._frame < len(self.frames) and self._at == len(self.frames[self._frame]):
            self._frame, self._at = self._frame + 1, 0


class _HeldMessage:
    """A message that waits for its payload, or behind a message that waits."""

    __slots__ = ("header", "key", "payload", "since")

    def __init__(self, header: Header, key: Hashable, payload: Frames | None) -> None:
        self.header, self.key, self.payload = header, key, payload
        self.since = clock.now()


class BulkReceiver:
    """The receiving half, for the messages of one channel; runs on the loop."""

    def __init__(self, host: BulkHost, channel: Channel) -> None:
        self._host, self._channel = host, channel
        self._queues: dict[Hashable, deque[_HeldMessage]] = {}
        self._waiting: dict[int, _HeldMessage] = {}
        self._arrived: dict[int, Frames] = {}
        self._unwanted: set[int] = set()
        self._assemblies: dict[int, _Assembly] = {}
        self._calls: dict[int, tuple[Hashable, int | None]] = {}
        """Held calls by id: their queue, and the number of their payload if that has not come."""

    # Messages.

    def holds(self, header: Header, payload: Frames) -> bool:
        """Hold a message that must wait behind others; False if it need not wait."""
        if not self._queues:
            return False
        if isinstance(header, Cancel | Keep | Credit) and (held := self._calls.get(header.call_id)) is not None:
            if type(header) is Cancel:
                self._cancel(header.call_id)
            else:
                self._queues[held[0]].append(_HeldMessage(header, held[0], payload))
            return True
        key = self._key_of(header)
        queue = self._queues.get(key) if key is not None else None
        if queue is None:
            return False
        queue.append(_HeldMessage(header, key, payload))
        if type(header) is Call:
            self._calls[header.call_id] = (key, None)
        return True

    def on_detached(self, message: Detached) -> None:
        """Handle a message whose payload comes over the bulk channel, or came already.

        Raises:
            MalformedFrame: the message cannot have such a payload.
        """
        header, number = reattach(message), message.number
        if number in self._waiting:
            raise MalformedFrame(f"two messages wait for payload {number}")
        key = self._key_of(header)
        if key is None:
            key = ("payload", number)
        held = _HeldMessage(header, key, self._arrived.pop(number, None))
        self._queues.setdefault(key, deque()).append(held)
        if type(header) is Call:
            self._calls[header.call_id] = (key, number)
        if held.payload is None:
            self._waiting[number] = held
        self._advance(key)

    # Payloads.

    def on_bulk(self, bulk: Bulk, payload: Frames) -> None:
        """Handle a whole payload, or the beginning of one.

        Raises:
            WireError: the payload is malformed or too large.
        """
        sizes = bulk.sizes
        if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) > PACKET_LIMIT_BYTES:
            raise MalformedFrame("a payload came with invalid sizes")
        if payload:
            if tuple(len(frame) for frame in payload) != sizes:
                raise MalformedFrame("a payload came that does not have the announced sizes")
            self._complete(bulk.number, payload)
        elif sum(sizes) == 0:
            self._complete(bulk.number, [b"" for _ in sizes])
        elif bulk.number in self._assemblies:
            raise MalformedFrame(f"payload {bulk.number} came twice")
        else:
            self._assemblies[bulk.number] = _Assembly(sizes)

    def on_part(self, part: BulkPart, payload: Frames) -> None:
        """Handle the next part of a payload.

        Raises:
            MalformedFrame: the part belongs to no payload.
        """
        assembly = self._assemblies.get(part.number)
        if assembly is None or len(payload) != 1:
            raise MalformedFrame(f"a part came of no payload ({part.number})")
        if assembly.add(payload[0]):
            del self._assemblies[part.number]
            self._complete(part.number, assembly.frames)

    def _complete(self, number: int, payload: Frames) -> None:
        if number in self._unwanted:
            self._unwanted.discard(number)
            return
        held = self._waiting.pop(number, None)
        if held is None:
            self._arrived[number] = payload
            return
        held.payload = payload
        self._advance(held.key)

    # Order.

    def _key_of(self, header: Header) -> Hashable | None:
        if type(header) is Call:
            place = self._host.order_of(header)
            return ("calls", place) if place is not None else None
        if type(header) is Reply or type(header) is Item:
            return ("answers", header.call_id)
        return None

    def _advance(self, key: Hashable) -> None:
        """Deliver the messages at the front of a queue that have their payloads."""
        queue = self._queues.get(key)
        while queue and queue[0].payload is not None:
            held = queue.popleft()
            header = held.header
            if type(header) is Call:
                self._calls.pop(header.call_id, None)
                header = header._replace(timeout_s=max(0.0, header.timeout_s - (clock.now() - held.since)))
            if not queue:
                self._queues.pop(key, None)
            assert held.payload is not None
            self._host.deliver(self._channel, header, held.payload)

    def _cancel(self, call_id: int) -> None:
        key, number = self._calls.pop(call_id)
        if number is not None and self._waiting.pop(number, None) is not None:
            self._unwanted.add(number)
        queue = self._queues[key]
        left = deque(held for held in queue if getattr(held.header, "call_id", None) != call_id)
        if left:
            self._queues[key] = left
        else:
            del self._queues[key]
        self._advance(key)
