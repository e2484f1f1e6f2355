"""`MemoryExchange`: the shared memory of a runtime, both halves in one class.

A buffer travels to a process on the same node in these steps, on these threads:

1. The caller's thread encodes a message and calls `capture` with its large buffers. The result are *frames*:
   memoryviews of shared memory (or bytes, where a buffer is small or there is no room). From then on the caller may
   change its arrays. Frames can be sent to any peer as plain bytes.
2. The loop's thread sends. For each frame and each receiver with the same `place`, `add_ref` returns a descriptor that
   travels in place of the frame. Then the frame may be dropped.
3. The receiver's loop calls `borrow`; the view that it returns is a frame like any other. `writable` makes it
   writable, as a tensor needs.
4. When the last view is gone, the exchange calls ``wake``; the loop's thread then calls `take_releases` and sends
   each peer the releases for it. The peer's loop calls `release`.

Peers are any hashable objects of the runtime; best is a link that is never used again after it broke.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from rlmesh.memory.attach import Attachments
from rlmesh.memory.device import Exported, exported_of
from rlmesh.memory.layout import DIRECTORY, Descriptor, SlotRelease, place
from rlmesh.memory.native import Buffer
from rlmesh.memory.pool import BUFFERS, Filler, PoolExhausted, SegmentPool

logger = logging.getLogger(__name__)

MIN_BYTES = 64 << 10
"""Smaller buffers are faster as bytes in the message."""
ALONE_BYTES = 1 << 20
"""Buffers of at least this size get their own slots; smaller buffers of one message share one."""
_WARN_EVERY_S = 60.0
_POLL_S = 0.001


class MemoryExchange:
    """The shared memory of one runtime.

    Args:
        job_id, owner: in the names of the segments; unique among the living processes of a node.
        wake: called from any thread, at any moment, when `take_releases` has something to return.
        limit_bytes: the most that this process's pool takes; None: as much as there is room for.
        may_wait: returns True if the calling thread may wait a moment until a receiver releases a slot; must be False
            on the thread that handles releases.
        min_bytes: smaller buffers are captured as bytes.
        directory: a tmpfs that is shared with the peers.

    Raises:
        ValueError: if ``job_id`` or ``owner`` cannot be part of a file name.
        OSError: if ``directory`` does not exist.
    """

    def __init__(
        self, job_id: str, owner: str, *, wake: Callable[[], object], limit_bytes: int | None = None,
        min_bytes: int = MIN_BYTES, directory: str = DIRECTORY, clock: Callable[[], float] = time.monotonic,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.place = place(directory)
        """Peers with an equal value can open this process's segments."""
        self.pool = SegmentPool(
            job_id, owner, limit_bytes=limit_bytes, directory=directory, clock=clock, reclaim=self._reclaim,
            may_wait=may_wait, wake=wake,
        )  # fmt: skip
        self.attachments = Attachments(job_id, on_ended=wake, directory=directory)
        self.exhausted = 0
        """The number of times that the pool had no room and buffers were captured as bytes."""
        self._min_bytes, self._wake, self._clock = min_bytes, wake, clock
        self._releases: dict[Hashable, list[SlotRelease]] = {}
        self._releases_lock = threading.Lock()
        self._warned_at: float | None = None

    # Sending.

    def capture(self, items: Sequence[Buffer | Filler]) -> list[Buffer]:
        """Frames of buffers, in the same order, which later changes of the buffers do not affect. Does not fail when
        there is no room."""
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
        """A frame of the slot that a buffer already shows.

        The pool counts the references to this process's own slots, the attachments all others, so that each release
        concerns only one of the two.
        """
        descriptor = self.attachments.unchanged(source)
        if descriptor is None:
            return None
        return self.pool.frame_at(descriptor) or self.attachments.frame_at(descriptor)

    def _put_ticket(self, source: Any, ticket: Exported) -> Buffer:
        """Capture the ticket of a tensor on a device, which is kept alive as long as the ticket's slot has holders."""
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

    def add_ref(self, frame: Buffer, receiver: Hashable) -> Descriptor | None:
        """Count one reference of a receiver and describe the frame to it; None: the frame must be sent as bytes."""
        if not isinstance(frame, memoryview):
            return None
        return self.pool.add_ref(frame, receiver) or self.attachments.add_ref(frame, receiver)

    def release(self, ended: Sequence[SlotRelease], receiver: Hashable) -> None:
        """End references, as a receiver reported."""
        self.pool.release(ended, receiver)
        self._add_releases(self.attachments.release(ended, receiver))

    # Receiving.

    def borrow(self, descriptors: Sequence[Descriptor], sender: Hashable) -> list[memoryview]:
        """Views of all buffers of one message, in the same order; on an error all of them are released.

        Raises:
            SlotGone, MalformedFrame, OSError: as `Attachments.borrow`.
        """
        views: list[memoryview] = []
        try:
            for descriptor in descriptors:
                views.append(self._borrow(descriptor, sender))  # noqa: PERF401 (the views are needed when one fails)
        except BaseException:
            refused = [SlotRelease(d.segment, d.slot, d.generation, 1) for d in descriptors[len(views) :]]
            self._add_releases({sender: refused})
            raise
        return views

    def _borrow(self, descriptor: Descriptor, sender: Hashable) -> memoryview:
        """Borrow a buffer; the reference to a slot of this process's own pool is released at once.

        The view's own frame holds such a slot, so that it can be reused as soon as the view is gone, without waiting
        for the sender.
        """
        own = self.pool.frame_at(descriptor)
        if own is None:
            return self.attachments.borrow(descriptor, sender)
        view = self.attachments.borrow(descriptor, None, own)
        self._add_releases({sender: [SlotRelease(descriptor.segment, descriptor.slot, descriptor.generation, 1)]})
        return view

    def take_releases(self) -> dict[Hashable, list[SlotRelease]]:
        """The releases to send, by peer. Call it when ``wake`` was called, from one thread at a time."""
        self.pool.settle()
        ended = self.attachments.collect()
        with self._releases_lock:
            releases, self._releases = self._releases, {}
        for sender, items in ended.items():
            releases.setdefault(sender, []).extend(items)
        return releases

    def _reclaim(self) -> None:
        """Before the pool grows: free its own slots that came back and are no longer needed."""
        self._add_releases(self.attachments.collect())

    def _add_releases(self, releases: dict[Hashable, list[SlotRelease]]) -> None:
        if releases:
            with self._releases_lock:
                for sender, ended in releases.items():
                    self._releases.setdefault(sender, []).extend(ended)
            self._wake()

    # Peers, time, the end.

    def peer_lost(self, peer: Hashable) -> None:
        """End the references of a peer that died or whose link broke, and drop the releases for it."""
        with self._releases_lock:
            self._releases.pop(peer, None)
        self.pool.receiver_lost(peer)
        self._add_releases(self.attachments.peer_lost(peer))

    def is_empty(self) -> bool:
        """True if this process has no segments of its own, and no segments of other processes open."""
        return self.pool.is_empty and self.attachments.is_empty

    def has_idle(self, idle_s: float) -> bool:
        """True if `trim` would free memory."""
        return self.pool.has_idle(idle_s) or self.attachments.has_removed()

    def trim(self, idle_s: float) -> int:
        """Give idle memory back to the system, and return its bytes.

        For a slow timer, on a thread that may block for 0.2 s per GiB.
        """
        self.attachments.forget_removed()
        return self.pool.trim(idle_s)

    def close(self, linger_s: float = 1.0) -> None:
        """Unlink this process's segments; live views stay valid.

        Blocks for at most ``linger_s`` until receivers have opened the last slots that were sent: call it when the
        packets are on their way.
        """
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
