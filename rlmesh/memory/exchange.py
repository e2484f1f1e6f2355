"""`MemoryExchange`: what a runtime needs of shared memory, both halves in one place.

How a buffer travels to a process on the same node, and what runs on which thread:

1. The caller's thread encodes a message and calls `capture` with its large buffers. It gives *frames*: memoryviews of
   shared memory (or bytes, where a buffer is small or there is no room). From then on the caller may change its
   arrays. Frames can be sent to anybody as plain bytes.
2. The loop's thread sends. For each frame and each receiver with the same `place`, `lend` gives a descriptor that
   travels in the frame's stead. Then the frame may be dropped.
3. The receiver's loop calls `borrow`; the view it gives is a frame like any other. `writable` makes of it what a
   tensor needs.
4. When the last view is gone, the exchange calls ``wake``; the loop's thread then calls `take_give_backs` and sends
   each peer what is its own. The peer's loop calls `give_back`.

Peers are whatever the runtime calls them by; a link that is never used again after it broke is best. A message that
could not be sent after `lend` is undone by `give_back_unsent`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from rlmesh.memory.attach import Attachments
from rlmesh.memory.device import Exported, exported_of
from rlmesh.memory.layout import DIRECTORY, Descriptor, LoanReturn, place
from rlmesh.memory.native import Buffer
from rlmesh.memory.pool import BUFFERS, Filler, PoolExhausted, SegmentPool

logger = logging.getLogger(__name__)

MIN_BYTES = 64 << 10
"""Smaller buffers are better off as bytes in the message."""
ALONE_BYTES = 1 << 20
"""From this size on a buffer has a slot of its own; smaller ones of one message share one."""
_WARN_EVERY_S = 60.0
_POLL_S = 0.001


class MemoryExchange:
    """The shared memory of one runtime.

    Args:
        job_id, owner: in the names of the segments; no two living processes of a node may have the same.
        wake: called from any thread, at any moment, when `take_give_backs` has something.
        limit_bytes: the most that this process's pool takes; None: whatever there is room for.
        may_wait: may the calling thread wait for a moment until a receiver gives something back? Not the one that
            takes the give-backs.
        min_bytes: smaller buffers are captured as bytes.
        directory: a tmpfs that is shared with the peers.

    Raises:
        ValueError: if ``job_id`` or ``owner`` cannot be part of a file name.
        OSError: if there is no such directory.
    """

    def __init__(
        self, job_id: str, owner: str, *, wake: Callable[[], object], limit_bytes: int | None = None,
        min_bytes: int = MIN_BYTES, directory: str = DIRECTORY, clock: Callable[[], float] = time.monotonic,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.place = place(directory)
        """Equal at a peer: it can open this process's segments."""
        self.pool = SegmentPool(
            job_id, owner, limit_bytes=limit_bytes, directory=directory, clock=clock, reclaim=self._reclaim,
            may_wait=may_wait, wake=wake,
        )  # fmt: skip
        self.attachments = Attachments(job_id, on_ended=wake, directory=directory)
        self.exhausted = 0
        """How often buffers were captured as bytes since the pool had no room."""
        self._min_bytes, self._wake, self._clock = min_bytes, wake, clock
        self._owed: dict[Hashable, list[LoanReturn]] = {}
        self._owing = threading.Lock()
        self._warned_at: float | None = None

    # Sending.

    def capture(self, items: Sequence[Buffer | Filler]) -> list[Buffer]:
        """Frames of buffers, in the same order, none of which changes any more. Never fails for want of room."""
        frames: list[Buffer | None] = [None] * len(items)
        shared: list[int] = []
        for i, item in enumerate(items):
            source = memoryview(item) if isinstance(item, BUFFERS) else item
            ticket = exported_of(source)
            if ticket is not None:
                frames[i] = self._put_ticket(source, ticket)
            elif source.nbytes < self._min_bytes:
                frames[i] = _copy(item)
            elif isinstance(source, memoryview) and (same := self._same(source)) is not None:
                frames[i] = same
            elif source.nbytes < ALONE_BYTES:
                shared.append(i)
            else:
                frames[i] = self._put([item])[0]
        if shared:
            for i, frame in zip(shared, self._put([items[i] for i in shared]), strict=True):
                frames[i] = frame
        return [frame for frame in frames if frame is not None]

    def _same(self, source: memoryview) -> memoryview | None:
        """A frame of the slot that a buffer shows already. Of a slot of one's own the pool counts the loans, so that
        each give-back is for one of the two halves only."""
        descriptor = self.attachments.unchanged(source)
        if descriptor is None:
            return None
        return self.pool.frame_at(descriptor) or self.attachments.frame_at(descriptor)

    def _put_ticket(self, source: Any, ticket: Exported) -> Buffer:
        """A tensor on a device: it lives as long as somebody holds its ticket."""
        try:
            return self.pool.put([source], keeps=ticket)[0]
        except PoolExhausted:
            self.exhausted += 1
            return ticket.contents()

    def _put(self, items: Sequence[Buffer | Filler]) -> Sequence[Buffer]:
        try:
            return self.pool.put(items)
        except PoolExhausted as error:
            self.exhausted += 1
            if self._warned_at is None or self._clock() - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = self._clock()
                logger.warning("messages go as plain bytes, which is several times slower: %s", error)
            return [_copy(item) for item in items]

    def lend(self, frame: Buffer, receiver: Hashable) -> Descriptor | None:
        """Where a receiver finds the frame, counted as one loan to it; None: the frame must be sent as bytes."""
        if not isinstance(frame, memoryview):
            return None
        return self.pool.lend(frame, receiver) or self.attachments.lend(frame, receiver)

    def give_back_unsent(self, descriptors: Iterable[Descriptor], receiver: Hashable) -> None:
        """Undo `lend`: the message was not sent."""
        self.give_back([LoanReturn(d.segment, d.slot, d.generation, 1) for d in descriptors], receiver)

    def give_back(self, ended: Sequence[LoanReturn], receiver: Hashable) -> None:
        """A receiver says that loans have ended."""
        self.pool.give_back(ended, receiver)
        self._owe(self.attachments.give_back(ended, receiver))

    # Receiving.

    def borrow(self, descriptors: Sequence[Descriptor], lender: Hashable) -> list[memoryview]:
        """Views of all buffers of one message, in the same order; on an error everything is given back.

        Raises:
            SlotGone, MalformedFrame, OSError: as `Attachments.borrow`.
        """
        views: list[memoryview] = []
        try:
            for descriptor in descriptors:
                views.append(self._borrow(descriptor, lender))  # noqa: PERF401 (kept when one fails)
        except BaseException:
            refused = [LoanReturn(d.segment, d.slot, d.generation, 1) for d in descriptors[len(views) :]]
            self._owe({lender: refused})
            raise
        return views

    def _borrow(self, descriptor: Descriptor, lender: Hashable) -> memoryview:
        """What comes home is given back at once: this process holds it by itself, and can use the slot again as soon
        as its own view is gone, without waiting for whoever passed it on."""
        home = self.pool.frame_at(descriptor)
        if home is None:
            return self.attachments.borrow(descriptor, lender)
        view = self.attachments.borrow(descriptor, None, home)
        self._owe({lender: [LoanReturn(descriptor.segment, descriptor.slot, descriptor.generation, 1)]})
        return view

    def take_give_backs(self) -> dict[Hashable, list[LoanReturn]]:
        """What to send to whom. Call it when ``wake`` was called, from one thread at a time."""
        self.pool.look()
        ended = self.attachments.collect()
        with self._owing:
            owed, self._owed = self._owed, {}
        for lender, items in ended.items():
            owed.setdefault(lender, []).extend(items)
        return owed

    def _reclaim(self) -> None:
        """The pool is about to grow: what came home and is no longer needed is room too."""
        self._owe(self.attachments.collect())

    def _owe(self, give_backs: dict[Hashable, list[LoanReturn]]) -> None:
        if give_backs:
            with self._owing:
                for lender, ended in give_backs.items():
                    self._owed.setdefault(lender, []).extend(ended)
            self._wake()

    # Peers, time, the end.

    def peer_lost(self, peer: Hashable) -> None:
        """A peer died or its link broke: it gives nothing back any more, and gets nothing."""
        with self._owing:
            self._owed.pop(peer, None)
        self.pool.receiver_lost(peer)
        self._owe(self.attachments.peer_lost(peer))

    def is_empty(self) -> bool:
        """This process has no segments of its own, and none of others open."""
        return self.pool.is_empty and self.attachments.is_empty

    def has_idle(self, idle_s: float) -> bool:
        """Is there something for `trim`?"""
        return self.pool.has_idle(idle_s) or self.attachments.has_removed()

    def trim(self, idle_s: float) -> int:
        """Give idle memory back to the system: bytes. For a slow timer, on a thread that may block for 0.2 s per
        GiB."""
        self.attachments.forget_removed()
        return self.pool.trim(idle_s)

    def close(self, linger_s: float = 1.0) -> None:
        """Unlink this process's segments; views that live stay valid. Blocks for at most ``linger_s`` until what
        was sent last has been opened by its receivers: call it when the packets are on their way."""
        deadline = time.monotonic() + linger_s
        while (self.pool.unattached() or self.attachments.unattached()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.pool.close()
        self.attachments.close()


def _copy(item: Buffer | Filler) -> bytes | bytearray:
    if isinstance(item, BUFFERS):
        return bytes(item)
    data = bytearray(item.nbytes)
    item.fill(memoryview(data))
    return data
