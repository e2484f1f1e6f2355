"""The state of `attach.Attachments`: open segments, locked slots, and ranges of them that views show.

Nothing here is thread-safe.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable, Hashable

from rlmesh.errors import MalformedFrame, SlotGone
from rlmesh.memory.layout import ENTRY, MAGIC, MAX_SLOTS, TABLE_BYTES, Descriptor, RefCounts, SlotRelease
from rlmesh.memory.native import (
    PAGE_BYTES,
    Mapping,
    address_of,
    export,
    on_end,
    owner_of,
    try_lock,
    unlock,
    view_of,
)


class Attached:
    """A segment of another process, open and mapped. Its descriptor holds the locks; it is closed with the last
    reference to this object, which may be a view that outlives the `Attachments`."""

    def __init__(self, path: str) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise SlotGone(f"the segment {path} is gone: the process that owned it has ended") from None
        weakref.finalize(self, os.close, self.fd).atexit = False
        status = os.fstat(self.fd)
        magic, nbytes, _, _ = ENTRY.unpack(os.pread(self.fd, ENTRY.size, 0).ljust(ENTRY.size, b"\0"))
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise MalformedFrame(f"{path} is not a segment of this user's")
        if magic != MAGIC or nbytes != status.st_size:
            raise MalformedFrame(f"{path} is not a whole segment of this version of rlmesh")
        self.path, self.name, self.nbytes = path, os.path.basename(path), nbytes
        self.private = Mapping.private(self.fd, 0, nbytes)
        self.slots: dict[int, Borrowed] = {}
        self._clean: Mapping | None = None

    @property
    def is_removed(self) -> bool:
        """True if the owner has unlinked the segment, so that no more slots of it will come."""
        return os.fstat(self.fd).st_nlink == 0

    def clean(self) -> Mapping:
        """A mapping of the file's own pages, without this process's changes; made when first needed."""
        if self._clean is None:
            self._clean = Mapping.shared(self.fd, 0, self.nbytes, writable=False)
        return self._clean


class Borrowed:
    """A slot that this process has locked, so that the owner does not reuse it."""

    def __init__(self, segment: Attached, descriptor: Descriptor) -> None:
        if not 1 <= descriptor.slot <= MAX_SLOTS:
            raise MalformedFrame(f"{descriptor.segment} has no slot {descriptor.slot}")
        self.segment, self.index, self.generation = segment, descriptor.slot, descriptor.generation
        if not try_lock(segment.fd, self.index, exclusive=False):
            raise SlotGone(f"slot {self.index} of {segment.path} is being used again: its sender has ended")
        generation, self.offset, self.nbytes, _ = ENTRY.unpack(
            os.pread(segment.fd, ENTRY.size, self.index * ENTRY.size)
        )
        if generation != self.generation:
            unlock(segment.fd, self.index)
            raise SlotGone(f"slot {self.index} of {segment.path} holds something else by now: its sender has ended")
        if self.offset < TABLE_BYTES or self.offset + self.nbytes > segment.nbytes or self.offset % PAGE_BYTES:
            unlock(segment.fd, self.index)
            raise MalformedFrame(f"slot {self.index} of {segment.path} lies outside the segment")
        self.parts = 0
        self.sender: Hashable = None
        self.to_release = 0
        """The number of references to release at the sender."""
        self.refs = RefCounts()
        """References of the receivers that the slot was passed on to."""
        self.own: memoryview | None = None
        """For a slot of this process's own pool that came back: a frame that keeps the pool from reusing it."""
        self.handed_out: list[tuple[int, int]] = []
        """Ranges of the segment's private mapping that views showed: these may have been written to."""

    def release(self, count: int) -> SlotRelease:
        return SlotRelease(self.segment.name, self.index, self.generation, count)

    def covers(self, offset: int, nbytes: int) -> bool:
        return bool(self.offset <= offset and offset + nbytes <= self.offset + self.nbytes)

    def is_handed_out(self, offset: int, nbytes: int) -> bool:
        return any(offset < end and start < offset + nbytes for start, end in self.handed_out)


class BorrowedRange:
    """A range of a borrowed slot that a view shows. ``mapping`` shows the file from ``base`` on."""

    __slots__ = ("address", "is_clean", "mapping", "nbytes", "offset", "slot")

    def __init__(
        self, slot: Borrowed, mapping: Mapping, base: int, offset: int, nbytes: int, *, is_clean: bool = False
    ) -> None:
        self.slot, self.mapping, self.offset, self.nbytes = slot, mapping, offset, nbytes
        self.address = mapping.address + offset - base
        self.is_clean = is_clean

    def descriptor(self, address: int, nbytes: int) -> Descriptor:
        offset = self.offset + address - self.address
        return Descriptor(self.slot.segment.name, self.slot.index, self.slot.generation, offset, nbytes)

    def view(self, when_gone: Callable[[BorrowedRange], None]) -> memoryview:
        exporter = export(self.address, self.nbytes, self)
        on_end(exporter, when_gone, self)
        return view_of(exporter).toreadonly()


def writable(view: memoryview) -> memoryview:
    """The writable view for a read-only view that `Attachments.borrow` returned; other views unchanged.

    Changes stay in this process and are dropped with the last view of the range.
    """
    part = owner_of(view)
    if not isinstance(part, BorrowedRange) or part.is_clean:
        return view
    start = address_of(view) - part.address
    return view_of(view.obj)[start : start + view.nbytes]  # type: ignore[arg-type]
