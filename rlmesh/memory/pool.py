"""The sender's half: reused segments, one copy in, a count of each receiver's references.

`SegmentPool.put` copies buffers into a slot and returns memoryviews of it, *frames*. A live frame holds its slot, and
so does every reference of a receiver (`add_ref`) until it is released (`release`) or the receiver is lost
(`receiver_lost`). A slot without holders is reused. The kernel has the last word: a slot that some process still
has locked, though the messages say otherwise (its connection broke, or the sender died after passing the slot on),
lingers until that process releases its lock.

Segments are never shrunk, and pages that were touched once stay mapped: filling a warm slot runs at the speed of
memcpy (17 GiB/s), filling fresh pages at a tenth of it. All methods may be called from any thread.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlmesh.memory.layout import (
    DIRECTORY,
    PART_ALIGNMENT,
    TABLE_BYTES,
    Descriptor,
    RefCounts,
    SlotRelease,
    segment_prefix,
)
from rlmesh.memory.native import PAGE_BYTES, Buffer, address_of, copy_to, export, on_end, owner_of, view_of
from rlmesh.memory.room import MemoryBudget, room_in
from rlmesh.memory.segment import ShmSegment

MIN_SEGMENT_BYTES = 4 << 20
MAX_STEP_BYTES = 1 << 30
"""A pool grows by a quarter of its size, between these two limits, or by the requested size if that is larger."""
_WAIT_FROM_BYTES = 16 << 20
WAIT_S_PER_BYTE = 0.04 / (1 << 30)
"""Longest wait for a referenced slot before fresh pages are filled, a tenth of the half second per GiB that these take:
a caller that sends in a loop gets its last answer a moment before its last slot."""

BUFFERS = (bytes, bytearray, memoryview)


class PoolExhausted(Exception):
    """The pool has no room for these bytes now, and the text says why; send them another way."""


class Filler(Protocol):
    """A value that can write its bytes into a buffer, such as a tensor with strides."""

    @property
    def nbytes(self) -> int: ...

    def fill(self, into: memoryview) -> None:
        """Write all ``nbytes``."""
        ...


@dataclass(eq=False, slots=True)
class _Slot:
    segment: ShmSegment
    index: int
    generation: int
    offset: int
    nbytes: int
    frames: int
    refs: RefCounts = field(default_factory=RefCounts)
    keeps: object = None
    """An object to keep alive for as long as the slot has holders."""

    @property
    def key(self) -> tuple[str, int]:
        return self.segment.name, self.index


@dataclass(frozen=True)
class PoolStats:
    """Sizes of a pool. ``lingering_slots`` are locked by processes that released them or whose connection is gone."""

    segments: int
    total_bytes: int
    used_bytes: int
    slots: int
    lingering_slots: int


class SegmentPool:
    """The segments of one process.

    Args:
        job_id, owner: parts of the segments' names, by which the job's guardian removes leftover segments.
        limit_bytes: the most that this pool takes; None: as much as there is room for.
        directory: a tmpfs that is shared with the receivers.
        clock: seconds; decides which segments are idle.
        reclaim: called before the pool grows; may make frames end.
        may_wait: returns True if the calling thread may wait until a slot is released.
        wake: called from any thread, at any moment, when `settle` should be called soon: a frame has ended whose slot
            keeps an object alive.
        room: returns the budget left in the directory and in memory.

    Raises:
        ValueError: if ``job_id`` or ``owner`` cannot be part of a file name.
    """

    def __init__(
        self, job_id: str, owner: str, *, limit_bytes: int | None = None, directory: str = DIRECTORY,
        clock: Callable[[], float] = time.monotonic, room: Callable[[str], MemoryBudget] = room_in,
        reclaim: Callable[[], None] = lambda: None, may_wait: Callable[[], bool] = lambda: False,
        wake: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.directory, self.limit_bytes = directory, limit_bytes
        self._prefix = segment_prefix(job_id, owner)
        self._clock, self._room, self._reclaim, self._may_wait = clock, room, reclaim, may_wait
        self._wake = wake
        self._lock, self._growth = threading.Lock(), threading.Lock()
        self._freed, self._waiting = threading.Condition(self._lock), 0
        self._segments: dict[str, ShmSegment] = {}
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._lingering: set[_Slot] = set()
        # The garbage collector ends frames at any moment and on any thread, even on one that holds this lock. So the
        # end is only recorded here, and the next operation handles it.
        self._ended: deque[_Slot] = deque()
        self._numbers = itertools.count()
        self._generations = itertools.count(secrets.randbits(60) | 1 << 60)
        self._pid = os.getpid()
        self._closed = False

    # Filling.

    def put(self, items: Sequence[Buffer | Filler], keeps: object = None) -> list[memoryview]:
        """Copy buffers into one slot and return read-only frames of it, in the same order.

        Args:
            keeps: an object that is kept alive as long as the slot has holders.

        Raises:
            PoolExhausted: there is no room, by the pool's own limit or the system's; nothing was taken.
        """
        sources = [memoryview(item) if isinstance(item, BUFFERS) else item for item in items]
        offsets, end = [], 0
        for source in sources:
            offsets.append(end)
            end = _round_up(end + source.nbytes, PART_ALIGNMENT)
        slot = self._make_slot(max(_round_up(end, PAGE_BYTES), PAGE_BYTES), len(sources))
        slot.keeps = keeps
        base = slot.segment.mapping.address + slot.offset
        try:
            views = [view_of(export(base + at, each.nbytes, slot)) for at, each in zip(offsets, sources, strict=True)]
            for view, source, at in zip(views, sources, offsets, strict=True):
                if isinstance(source, memoryview):
                    copy_to(base + at, source)
                else:
                    source.fill(view)
        except BaseException:
            with self._lock:
                slot.frames = 0
                self._settle(slot)
            raise
        for view in views:
            on_end(view.obj, self._frame_ended, slot)  # type: ignore[arg-type]
        return [view.toreadonly() for view in views]

    def frame_at(self, descriptor: Descriptor) -> memoryview | None:
        """Another frame of a slot in use; None if the descriptor is not of a slot in use of this pool."""
        with self._lock:
            slot = self._slots.get((descriptor.segment, descriptor.slot))
            if slot is None or slot.generation != descriptor.generation or slot in self._lingering:
                return None
            slot.frames += 1
        view = view_of(export(slot.segment.mapping.address + descriptor.offset, descriptor.nbytes, slot))
        on_end(view.obj, self._frame_ended, slot)  # type: ignore[arg-type]
        return view.toreadonly()

    def _frame_ended(self, slot: _Slot) -> None:
        if not self._closed:
            self._ended.append(slot)
            if slot.keeps is not None:
                self._wake()

    def settle(self) -> None:
        """Settle slots whose frames have ended."""
        if self._ended:
            with self._lock:
                self._settle_ended()

    def _make_slot(self, nbytes: int, frames: int) -> _Slot:
        if self._pid != os.getpid():
            raise PoolExhausted("the pool belongs to the parent of this forked process")
        with self._lock:
            self._settle_ended()
            slot = self._place(nbytes, frames) or (self._retry_lingering() and self._place(nbytes, frames))
        if slot:
            return slot
        self._reclaim()
        with self._lock:
            self._settle_ended()
            slot = self._place(nbytes, frames) or self._place_soon(nbytes, frames)
        if slot:
            return slot
        # The loop's thread takes the lock too, and reserving and freeing pages takes long (half a second per GiB).
        with self._growth:
            with self._lock:
                self._settle_ended()
                slot = self._place(nbytes, frames)
            if slot:
                return slot
            segment = self._create_segment(self._size_of_next(nbytes), nbytes)
            with self._lock:
                if self._closed:
                    segment.remove()
                    raise PoolExhausted("the pool is closed")
                self._segments[segment.name] = segment
                slot = self._take(segment, nbytes, frames)
                assert slot is not None
                return slot

    def _place(self, nbytes: int, frames: int) -> _Slot | None:
        """A slot in the smallest hole of all segments."""
        if self._closed:
            raise PoolExhausted("the pool is closed")
        best: tuple[int, ShmSegment] | None = None
        for segment in self._segments.values():
            found = segment.space.best(nbytes) if segment.has_index else None
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], segment)
        return self._take(best[1], nbytes, frames) if best is not None else None

    def _place_soon(self, nbytes: int, frames: int) -> _Slot | None:
        """Wait a little for a slot of that size, if a receiver has one that it may release."""
        if nbytes < _WAIT_FROM_BYTES or not any(s.refs and s.nbytes >= nbytes for s in self._slots.values()):
            return None
        deadline = time.monotonic() + nbytes * WAIT_S_PER_BYTE
        slot: _Slot | None = None
        self._waiting += 1
        while self._may_wait() and slot is None and (left_s := deadline - time.monotonic()) > 0:
            self._freed.wait(left_s)
            slot = self._place(nbytes, frames)
        self._waiting -= 1
        return slot

    def _take(self, segment: ShmSegment, nbytes: int, frames: int) -> _Slot | None:
        generation = next(self._generations)
        taken = segment.take(nbytes, generation)
        if taken is None:
            return None
        slot = _Slot(segment, taken[0], generation, taken[1], nbytes, frames)
        self._slots[slot.key] = slot
        return slot

    # Growing and shrinking.

    def _size_of_next(self, nbytes: int) -> int:
        """Data bytes of the next segment; removes idle segments if the limit demands it."""
        limit = self.limit_bytes
        missing = self._total() + TABLE_BYTES + nbytes - limit if limit is not None else 0
        if limit is not None and missing > 0 and not self._remove_idle_if_enough(missing):
            stats = self.stats()
            raise PoolExhausted(
                f"{_mib(nbytes)} do not fit into the pool's limit of {_mib(limit)}: "
                f"{_mib(stats.used_bytes)} are in use by {stats.slots} messages or values that receivers keep"
            )
        step = min(max(self._total() // 4, MIN_SEGMENT_BYTES), MAX_STEP_BYTES)
        if limit is not None:
            step = min(step, limit - self._total() - TABLE_BYTES)
        return max(nbytes, step // PAGE_BYTES * PAGE_BYTES)

    def _create_segment(self, size: int, least: int) -> ShmSegment:
        room = self._room(self.directory)
        if (missing := TABLE_BYTES + least - room.bytes) > 0 and self._remove_idle_if_enough(missing):
            room = self._room(self.directory)
        if room.bytes < TABLE_BYTES + size:
            size = least
        if room.bytes < TABLE_BYTES + size:
            raise PoolExhausted(f"there is no room for {_mib(least)} of shared memory: {room.limited_by}")
        while True:
            path = os.path.join(self.directory, f"{self._prefix}{next(self._numbers)}")
            try:
                return ShmSegment(path, size)
            except FileExistsError:
                continue  # a leftover of an earlier process of the same name
            except OSError as error:
                if size > least:
                    size = least
                    continue
                raise PoolExhausted(
                    f"{_mib(size)} of shared memory could not be reserved in {self.directory}: {error.strerror}; "
                    f"{room.limited_by}"
                ) from error

    def _remove_idle_if_enough(self, nbytes: int) -> bool:
        """Remove idle segments, which are warm, if that frees at least ``nbytes``; True if it did."""
        if sum(s.nbytes for s in list(self._segments.values()) if s.space.is_empty) < nbytes:
            return False
        return self._remove_idle(self._clock()) >= nbytes

    def _remove_idle(self, idle_since: float) -> int:
        """Remove segments that have been empty since ``idle_since``, and return their bytes."""
        with self._lock:
            idle = [s for s in self._segments.values() if s.space.is_empty and s.idle_since <= idle_since]
            for segment in idle:
                del self._segments[segment.name]
        for segment in idle:
            segment.remove()
        return sum(segment.nbytes for segment in idle)

    @property
    def is_empty(self) -> bool:
        return not self._segments

    def has_idle(self, idle_s: float) -> bool:
        """True if `trim` would free memory."""
        with self._lock:
            self._settle_ended()
            before = self._clock() - idle_s
            return any(s.space.is_empty and s.idle_since <= before for s in self._segments.values()) or bool(
                self._lingering
            )

    def trim(self, idle_s: float) -> int:
        """Remove segments that have been empty for ``idle_s``, and return their bytes.

        Freeing takes 0.2 s per GiB: do not call it on a loop's thread.
        """
        if self._closed or self._pid != os.getpid():
            return 0
        with self._lock:
            self._settle_ended()
            self._retry_lingering()
        return self._remove_idle(self._clock() - idle_s)

    # References of receivers.

    def add_ref(self, frame: memoryview, receiver: Hashable) -> Descriptor | None:
        """Count one more reference of a receiver, which must not be lost already, and describe the frame to it; None
        if this pool has no such frame."""
        with self._lock:
            slot = owner_of(frame)
            if self._closed or not isinstance(slot, _Slot) or self._slots.get(slot.key) is not slot:
                return None
            slot.refs.add(receiver)
            offset = address_of(frame) - slot.segment.mapping.address
            return Descriptor(slot.segment.name, slot.index, slot.generation, offset, frame.nbytes)

    def release(self, ended: Iterable[SlotRelease], receiver: Hashable) -> None:
        """End references of a receiver; references that it does not have (late or repeated messages) are ignored."""
        with self._lock:
            self._settle_ended()
            for segment, index, generation, refs in ended:
                slot = self._slots.get((segment, index))
                if slot is not None and slot.generation == generation and slot.refs.release(receiver, refs):
                    self._settle(slot)

    def receiver_lost(self, receiver: Hashable) -> int:
        """End all references of a receiver that died or cannot be reached, and return the number of its slots."""
        with self._lock:
            self._settle_ended()
            had = [slot for slot in self._slots.values() if slot.refs.pop(receiver, 0)]
            for slot in had:
                self._settle(slot)
            return len(had)

    # Slots.

    def _settle_ended(self) -> None:
        while self._ended:
            slot = self._ended.popleft()
            slot.frames -= 1
            self._settle(slot)

    def _settle(self, slot: _Slot) -> None:
        """Free a slot if it has no holders."""
        if self._closed or slot.frames > 0 or slot.refs:
            return
        if not slot.segment.retire(slot.index, slot.offset, slot.nbytes):
            self._lingering.add(slot)
            return
        self._lingering.discard(slot)
        del self._slots[slot.key]
        slot.keeps = None
        if slot.segment.space.is_empty:
            slot.segment.idle_since = self._clock()
        if self._waiting:
            self._freed.notify_all()

    def _retry_lingering(self) -> bool:
        before = len(self._lingering)
        for slot in list(self._lingering):
            self._settle(slot)
        return len(self._lingering) < before

    def _total(self) -> int:
        return sum(segment.nbytes for segment in list(self._segments.values()))

    def stats(self) -> PoolStats:
        with self._lock:
            self._settle_ended()
            used = sum(slot.nbytes for slot in self._slots.values())
            return PoolStats(len(self._segments), self._total(), used, len(self._slots), len(self._lingering))

    def unattached(self) -> int:
        """The number of referenced slots that no receiver seems to have opened yet."""
        with self._lock:
            return sum(bool(s.refs) and not s.segment.is_attached(s.index) for s in self._slots.values())

    def close(self) -> None:
        """Unlink all segments. Frames and opened slots stay readable; their memory goes with the last of them."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._settle_ended()
            self._closed = True
            _outliving.extend(slot.keeps for slot in self._slots.values() if slot.keeps is not None and slot.refs)
            segments = list(self._segments.values())
            for table in (self._segments, self._slots, self._lingering, self._ended):
                table.clear()
        for segment in segments:
            segment.remove()


_outliving: list[object] = []
"""Objects that receivers of closed pools may still use, kept alive until this process ends."""


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
