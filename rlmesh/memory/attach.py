"""The receiver's half: views of slots that other processes own.

`Attachments.borrow` returns a memoryview of a slot without a copy, over one private copy-on-write mapping per segment
that stays mapped, so that a reused slot costs no page faults. A process that writes to the memory gets its own pages;
the owner and the other borrowers do not see the change. When the last array, tensor or view of a slot is gone, on
any thread, `on_ended` is called; `collect` then drops the pages that were written to (`private_pages` has the figures),
unlocks the slot and returns the references to release, by sender.

A borrowed view that was not written to can be passed on without a copy (`unchanged`, `frame_at`, `add_ref`). The slot
then counts as borrowed until those references have ended too, so a release always goes to the process that sent
the descriptor, never further. If a process receives a slot that it already holds through another sender, it releases
the new reference at once: otherwise two processes that pass a value back and forth would each wait for the other's
release.

A slot that arrives a second time while views of it live gets its own mapping, so that two receivers in one process
do not see each other's changes either.

A forked child has the views of its parent, and its own locks on their slots: the parent releases slots that it does
not need any more, and the owner reuses them once the child has ended, too.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from rlmesh.errors import MalformedFrame, SlotGone
from rlmesh.memory.borrowed import Attached, Borrowed, BorrowedRange, writable
from rlmesh.memory.layout import DIRECTORY, Descriptor, SlotRelease, segment_prefix
from rlmesh.memory.native import PAGE_BYTES, Mapping, address_of, is_locked_by_others, owner_of, try_lock, unlock
from rlmesh.memory.private_pages import PrivatePages

__all__ = ["Attachments", "writable"]

logger = logging.getLogger(__name__)


class Attachments:
    """The slots that this process has borrowed.

    Args:
        job_id: only segments of this job are opened.
        on_ended: called, from any thread and at any moment, when `collect` has work; it must do no more than wake the
            thread that calls `collect`.
        directory: the directory of the owners' segments.
    """

    def __init__(self, job_id: str, *, on_ended: Callable[[], object], directory: str = DIRECTORY) -> None:
        self._prefix, self._directory, self._on_ended = segment_prefix(job_id), directory, on_ended
        self._lock = threading.Lock()
        self._segments: dict[str, Attached] = {}
        self._reachable: list[tuple[int, int, BorrowedRange]] = []
        self._ended: deque[BorrowedRange] = deque()
        self._to_release: dict[Hashable, list[SlotRelease]] = {}
        self._notified = self._closed = False
        self._pid = os.getpid()
        self._pages = PrivatePages()
        _attachments.add(self)

    # Borrowing.

    def borrow(self, descriptor: Descriptor, sender: Hashable | None, own: memoryview | None = None) -> memoryview:
        """A read-only view of a buffer whose descriptor came from ``sender``; see `writable`.

        Args:
            own: for a slot of this process's own pool, a frame of the slot, held as long as the view; ``sender`` is
                then None, and there is no reference to release.

        Raises:
            SlotGone: the slot was reused, since the sender died before this call.
            MalformedFrame: no such buffer can exist.
            OSError: the segment cannot be opened or mapped (too many files or mappings).
        """
        with self._lock:
            segment = self._open(descriptor.segment)
            slot = segment.slots.get(descriptor.slot)
            is_new = slot is None
            if slot is None:
                slot = segment.slots[descriptor.slot] = Borrowed(segment, descriptor)
            elif slot.generation != descriptor.generation:
                # This process holds the slot, so the descriptor is of an earlier use of it.
                raise SlotGone(f"slot {slot.index} of {segment.path} holds something else: its sender has ended")
            try:
                if not slot.covers(descriptor.offset, descriptor.nbytes):
                    raise MalformedFrame(f"{descriptor} is not inside its slot")
                view = self._make_part(slot, descriptor.offset, descriptor.nbytes)
            except BaseException:
                self._release_if_idle(slot, {})
                raise
            if is_new:
                slot.sender = sender
            if slot.own is None:
                slot.own = own
            if sender is None:
                pass
            elif slot.sender == sender:
                slot.to_release += 1
            else:
                self._to_release.setdefault(sender, []).append(slot.release(1))
                self._notify()
            return view

    def _make_part(self, slot: Borrowed, offset: int, nbytes: int) -> memoryview:
        if slot.is_handed_out(offset, nbytes):
            base = offset // PAGE_BYTES * PAGE_BYTES
            mapping = Mapping.private(slot.segment.fd, base, offset + nbytes - base)
            part = BorrowedRange(slot, mapping, base, offset, nbytes)
        else:
            slot.handed_out.append((offset, offset + nbytes))
            part = BorrowedRange(slot, slot.segment.private, 0, offset, nbytes)
        slot.parts += 1
        insort(self._reachable, (part.address, id(part), part))
        return part.view(self._part_ended)

    def _open(self, name: str) -> Attached:
        if self._closed or self._pid != os.getpid():
            raise SlotGone("this process borrows no shared memory any more")
        known = self._segments.get(name)
        if known is not None and not known.is_removed:
            return known
        if not name.startswith(self._prefix) or re.fullmatch(r"[A-Za-z0-9._-]+", name) is None:
            raise MalformedFrame(f"{name!r:.100} is not a segment of this job")
        try:
            segment = Attached(os.path.join(self._directory, name))
        except SlotGone:
            if known is None:
                raise
            return known  # the owner has ended, but the slots that it sent before are still mapped
        self._segments[name] = segment
        self._forget_removed()
        return segment

    def _forget_removed(self) -> None:
        for name, segment in list(self._segments.items()):
            if segment.is_removed and not segment.slots:
                del self._segments[name]

    def lock_for_child(self) -> list[tuple[Attached, int]]:
        """Before a fork, open each segment once more and lock its slots with live views by the new descriptor."""
        made = []
        with self._lock:
            for segment in self._segments.values():
                try:
                    copy = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    logger.warning("a forked child may see %s change: %s", segment.path, error)
                    continue
                made.append((segment, copy))
                for index, slot in segment.slots.items():
                    if slot.parts:
                        try_lock(copy, index, exclusive=False)
        return made

    # The end of views.

    def _part_ended(self, part: BorrowedRange) -> None:
        # Runs inside the garbage collector, perhaps on a thread that holds the lock, so it must not take the lock.
        if self._closed:
            return
        self._ended.append(part)
        self._notify()

    def _notify(self) -> None:
        if not self._notified:
            self._notified = True
            self._on_ended()

    def collect(self) -> dict[Hashable, list[SlotRelease]]:
        """Free the slots whose last view is gone, and return the references to release, by sender.

        Takes up to 10 ms of CPU time per GiB of views that were read completely.
        """
        with self._lock:
            self._notified = False
            releases, self._to_release = self._to_release, {}
            while self._ended:
                part = self._ended.popleft()
                slot = part.slot
                slot.parts -= 1
                if not part.is_clean:
                    position = bisect_left(self._reachable, (part.address, id(part)))
                    del self._reachable[position]
                self._release_if_idle(slot, releases)
        return releases

    def _release_if_idle(self, slot: Borrowed, releases: dict[Hashable, list[SlotRelease]]) -> None:
        if slot.parts or slot.refs:
            return
        segment = slot.segment
        base = segment.private.address
        for begin, end in slot.handed_out:
            # Views that were never made writable are included: torch.from_numpy writes to read-only arrays.
            for start, length in self._pages.runs(base + begin, end - begin):
                segment.private.drop_private_pages(start - base, length)
        unlock(segment.fd, slot.index)
        slot.own = None
        if segment.slots.get(slot.index) is slot:
            del segment.slots[slot.index]
        if slot.to_release:
            releases.setdefault(slot.sender, []).append(slot.release(slot.to_release))
        if not segment.slots and segment.is_removed and self._segments.get(segment.name) is segment:
            del self._segments[segment.name]

    # Passing on.

    def unchanged(self, view: memoryview) -> Descriptor | None:
        """The descriptor of borrowed memory that was not written to; None for other memory.

        Reads the page table of the range: 10 ms of CPU time per GiB.
        """
        if not view.nbytes or not view.c_contiguous or not self._reachable or self._pid != os.getpid():
            return None
        address = address_of(view)
        with self._lock:
            part = self._part_at(address, view.nbytes)
        # The caller's view keeps the `BorrowedRange` alive, so its pages can be read without the lock.
        if part is None or self._pages.any(address, view.nbytes):
            return None
        return part.descriptor(address, view.nbytes)

    def frame_at(self, descriptor: Descriptor) -> memoryview | None:
        """A frame of a slot that this process holds, with the bytes that the owner wrote, to be passed on."""
        with self._lock:
            segment = self._segments.get(descriptor.segment)
            slot = segment.slots.get(descriptor.slot) if segment is not None else None
            if slot is None or slot.generation != descriptor.generation:
                return None
            slot.parts += 1
            part = BorrowedRange(slot, slot.segment.clean(), 0, descriptor.offset, descriptor.nbytes, is_clean=True)
            return part.view(self._part_ended)

    def _part_at(self, address: int, nbytes: int) -> BorrowedRange | None:
        position = bisect_right(self._reachable, address, key=lambda entry: entry[0])
        while position:
            position -= 1
            start, _, part = self._reachable[position]
            if part.nbytes:
                return part if address + nbytes <= start + part.nbytes else None
        return None

    def add_ref(self, frame: memoryview, receiver: Hashable) -> Descriptor | None:
        """Count a reference of a receiver to a frame that `frame_at` returned, and describe the frame to it.

        None if `frame_at` did not return the frame, or if its segment went with its owner, so that no receiver can
        open it.
        """
        part = owner_of(frame)
        if not isinstance(part, BorrowedRange) or not part.is_clean or part.slot.segment.is_removed:
            return None
        with self._lock:
            slot = part.slot
            if self._closed:
                return None
            slot.refs.add(receiver)
            return part.descriptor(address_of(frame), frame.nbytes)

    def release(self, ended: Iterable[SlotRelease], receiver: Hashable) -> dict[Hashable, list[SlotRelease]]:
        """End references of a receiver to slots that were passed on; returns the references that this process can now
        release, by sender."""
        releases: dict[Hashable, list[SlotRelease]] = {}
        with self._lock:
            for name, index, generation, refs in ended:
                segment = self._segments.get(name)
                slot = segment.slots.get(index) if segment is not None else None
                if slot is not None and slot.generation == generation and slot.refs.release(receiver, refs):
                    self._release_if_idle(slot, releases)
        return releases

    def peer_lost(self, peer: Hashable) -> dict[Hashable, list[SlotRelease]]:
        """End the references of a peer that died or cannot be reached, and drop the releases for it; views stay valid.

        Returns the references that this process can now release, by sender.
        """
        releases: dict[Hashable, list[SlotRelease]] = {}
        with self._lock:
            self._to_release.pop(peer, None)
            for segment in list(self._segments.values()):
                for slot in list(segment.slots.values()):
                    if slot.sender == peer:
                        slot.to_release = 0
                    if slot.refs.pop(peer, 0):
                        self._release_if_idle(slot, releases)
            self._forget_removed()
        return releases

    @property
    def is_empty(self) -> bool:
        """True if no segment is open."""
        return not self._segments

    def has_removed(self) -> bool:
        """True if `forget_removed` would unmap a segment."""
        with self._lock:
            return any(segment.is_removed and not segment.slots for segment in self._segments.values())

    def forget_removed(self) -> None:
        """Unmap segments that their owners have removed, to free their memory. For a slow timer."""
        with self._lock:
            self._forget_removed()

    def unattached(self) -> int:
        """The number of slots passed on that no receiver seems to have opened yet."""
        with self._lock:
            return sum(
                bool(slot.refs) and not is_locked_by_others(segment.fd, slot.index)
                for segment in self._segments.values()
                for slot in segment.slots.values()
            )

    def close(self) -> None:
        """Stop borrowing. Live views stay valid, and their slots locked, until the views end."""
        with self._lock:
            self._closed = True
            for segment in self._segments.values():
                segment.slots.clear()
            self._segments.clear()
            for table in (self._reachable, self._ended, self._to_release):
                table.clear()
            self._pages.close()


_attachments: weakref.WeakSet[Attachments] = weakref.WeakSet()


class _ForkedMappings(threading.local):
    """The descriptors that a forking thread made for its child, with their segments, so that no number is reused."""

    made: tuple[tuple[Attached, int], ...] = ()


_forking = _ForkedMappings()


def _before_fork() -> None:
    _forking.made = tuple(pair for each in list(_attachments) for pair in each.lock_for_child())


def _after_fork_in_parent() -> None:
    made, _forking.made = _forking.made, ()
    for _, copy in made:
        os.close(copy)  # the child's copy of the descriptor holds the locks


def _after_fork_in_child() -> None:
    made, _forking.made = _forking.made, ()
    for segment, copy in made:
        os.dup2(copy, segment.fd, inheritable=False)
        os.close(copy)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
