"""The receiver's half: views of slots that other processes own.

`Attachments.borrow` gives a memoryview of a slot without a copy: of one private copy-on-write mapping per segment that
stays mapped, so that a slot that is used again costs no page faults. Whoever writes to the memory gets pages of its
own; the owner and the other borrowers see nothing of it. When the last array, tensor or view of a slot is gone,
wherever that happens, `on_ended` is called; `collect` then drops the pages that were written to (`private_pages` has
the figures), unlocks the slot and says what to give back to whom.

A view that was borrowed can be lent on without a copy if nothing was written to it (`unchanged`, `frame_at`, `lend`).
The slot then counts as borrowed until those loans have ended too, so give-backs always go to whoever lent, never
further. What a process gets lent that it holds already, through somebody else, it gives back at once: otherwise two
that lend a value to and fro would wait for each other.

A slot that arrives a second time while views of it live gets a mapping of its own, so that two receivers in one
process do not see each other's changes either.

A forked child has the views of its parent, and locks of its own on their slots: the parent gives back what it does not
need any more, and the owner uses it again when the child has ended, too.
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
from typing import Any

from rlmesh.errors import MalformedFrame, SlotGone
from rlmesh.memory.borrowed import Attached, Borrowed, BorrowedRange, writable
from rlmesh.memory.layout import DIRECTORY, Descriptor, LoanReturn, segment_prefix
from rlmesh.memory.native import PAGE_BYTES, Mapping, address_of, is_locked_by_others, owner_of, try_lock, unlock
from rlmesh.memory.private_pages import PrivatePages

__all__ = ["Attachments", "writable"]

logger = logging.getLogger(__name__)


class Attachments:
    """What this process has borrowed.

    Args:
        job_id: only segments of this job are opened.
        on_ended: called, from any thread and at any moment, when `collect` has something to do; it must do no more
            than wake up whoever calls that.
        directory: where the owners make their segments.
    """

    def __init__(self, job_id: str, *, on_ended: Callable[[], object], directory: str = DIRECTORY) -> None:
        self._prefix, self._directory, self._on_ended = segment_prefix(job_id), directory, on_ended
        self._lock = threading.Lock()
        self._segments: dict[str, Attached] = {}
        self._reachable: list[tuple[int, int, BorrowedRange]] = []
        self._ended: deque[BorrowedRange] = deque()
        self._to_give_back: dict[Hashable, list[LoanReturn]] = {}
        self._told = self._closed = False
        self._pid = os.getpid()
        self._pages = PrivatePages()
        _attachments.add(self)

    # Borrowing.

    def borrow(self, descriptor: Descriptor, lender: Hashable | None, home: memoryview | None = None) -> memoryview:
        """A read-only view of a buffer that ``lender`` has lent to this process; see `writable`. Of a slot of this
        process's own pool ``home`` is a frame, which is held as long as the view; then nothing is owed to a lender.

        Raises:
            SlotGone: the slot holds something else by now, since its lender died before this call.
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
                # This process holds the slot as it is, so the descriptor is of before that.
                raise SlotGone(f"slot {slot.index} of {segment.path} holds something else: its lender has ended")
            try:
                if not slot.covers(descriptor.offset, descriptor.nbytes):
                    raise MalformedFrame(f"{descriptor} is not inside its slot")
                view = self._make_part(slot, descriptor.offset, descriptor.nbytes)
            except BaseException:
                self._release_if_idle(slot, {})
                raise
            if is_new:
                slot.lender = lender
            if slot.home is None:
                slot.home = home
            if lender is None:
                pass
            elif slot.lender == lender:
                slot.debt += 1
            else:
                self._to_give_back.setdefault(lender, []).append(slot.give_back(1))
                self._tell()
            return view

    def _make_part(self, slot: Borrowed, offset: int, nbytes: int) -> memoryview:
        if slot.is_given_out(offset, nbytes):
            base = offset // PAGE_BYTES * PAGE_BYTES
            mapping = Mapping.private(slot.segment.fd, base, offset + nbytes - base)
            part = BorrowedRange(slot, mapping, base, offset, nbytes)
        else:
            slot.given_out.append((offset, offset + nbytes))
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
            return known  # its owner has ended; what it lent before is still there
        self._segments[name] = segment
        self._forget_removed()
        return segment

    def _forget_removed(self) -> None:
        for name, segment in list(self._segments.items()):
            if segment.is_removed and not segment.slots:
                del self._segments[name]

    def lock_for_child(self) -> list[tuple[Attached, int]]:
        """Before a fork: each open segment, and another descriptor of it that locks the slots whose views live."""
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
        # Inside the garbage collector, perhaps of a thread that holds the lock: no more than this.
        if self._closed:
            return
        self._ended.append(part)
        self._tell()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._on_ended()

    def collect(self) -> dict[Hashable, list[LoanReturn]]:
        """Make the slots free whose last view is gone, and say what to give back: lender → loans.

        Takes up to 10 ms of CPU time per GiB of views that were read through.
        """
        with self._lock:
            self._told = False
            give_backs, self._to_give_back = self._to_give_back, {}
            while self._ended:
                part = self._ended.popleft()
                slot = part.slot
                slot.parts -= 1
                if not part.is_clean:
                    position = bisect_left(self._reachable, (part.address, id(part)))
                    del self._reachable[position]
                self._release_if_idle(slot, give_backs)
        return give_backs

    def _release_if_idle(self, slot: Borrowed, give_backs: dict[Hashable, list[LoanReturn]]) -> None:
        if slot.parts or slot.loans:
            return
        segment = slot.segment
        base = segment.private.address
        for begin, end in slot.given_out:
            # Also of views that were never made writable: torch.from_numpy writes to read-only arrays.
            for start, length in self._pages.runs(base + begin, end - begin):
                segment.private.drop_private_pages(start - base, length)
        unlock(segment.fd, slot.index)
        slot.home = None
        if segment.slots.get(slot.index) is slot:
            del segment.slots[slot.index]
        if slot.debt:
            give_backs.setdefault(slot.lender, []).append(slot.give_back(slot.debt))
        if not segment.slots and segment.is_removed and self._segments.get(segment.name) is segment:
            del self._segments[segment.name]

    # Lending on.

    def unchanged(self, view: memoryview) -> Descriptor | None:
        """Where borrowed memory is from that nothing was written to; None for other memory. Reads the page table of
        the range: 10 ms of CPU time per GiB."""
        if not view.nbytes or not view.c_contiguous or not self._reachable or self._pid != os.getpid():
            return None
        address = address_of(view)
        with self._lock:
            part = self._part_at(address, view.nbytes)
        # The view keeps the part alive, so this needs no lock.
        if part is None or self._pages.any(address, view.nbytes):
            return None
        return part.descriptor(address, view.nbytes)

    def frame_at(self, descriptor: Descriptor) -> memoryview | None:
        """A frame of bytes of a slot that this process holds, as its owner wrote them, to be lent on."""
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

    def lend(self, frame: memoryview, receiver: Hashable) -> Descriptor | None:
        """Count a loan of a frame that `frame_at` gave; None if it is none of these, or if nobody can open it any more:
        its owner has ended, and its segment went with it."""
        part = owner_of(frame)
        if not isinstance(part, BorrowedRange) or not part.is_clean or part.slot.segment.is_removed:
            return None
        with self._lock:
            slot = part.slot
            if self._closed:
                return None
            slot.loans[receiver] = slot.loans.get(receiver, 0) + 1
            return part.descriptor(address_of(frame), frame.nbytes)

    def give_back(self, ended: Iterable[LoanReturn], receiver: Hashable) -> dict[Hashable, list[LoanReturn]]:
        """Loans that were lent on have ended; what to give back to this process's own lenders therefore."""
        give_backs: dict[Hashable, list[LoanReturn]] = {}
        with self._lock:
            for name, index, generation, loans in ended:
                segment = self._segments.get(name)
                slot = segment.slots.get(index) if segment is not None else None
                if slot is None or slot.generation != generation or receiver not in slot.loans:
                    continue
                slot.loans[receiver] -= loans
                if slot.loans[receiver] <= 0:
                    del slot.loans[receiver]
                    self._release_if_idle(slot, give_backs)
        return give_backs

    def peer_lost(self, peer: Hashable) -> dict[Hashable, list[LoanReturn]]:
        """A peer died or cannot be reached: its loans have ended, and nothing is owed to it. Views stay valid."""
        give_backs: dict[Hashable, list[LoanReturn]] = {}
        with self._lock:
            self._to_give_back.pop(peer, None)
            for segment in list(self._segments.values()):
                for slot in list(segment.slots.values()):
                    if slot.lender == peer:
                        slot.debt = 0
                    if slot.loans.pop(peer, 0):
                        self._release_if_idle(slot, give_backs)
            self._forget_removed()
        return give_backs

    @property
    def is_empty(self) -> bool:
        """No segment is open."""
        return not self._segments

    def has_removed(self) -> bool:
        """Is there something for `forget_removed`?"""
        with self._lock:
            return any(segment.is_removed and not segment.slots for segment in self._segments.values())

    def forget_removed(self) -> None:
        """Unmap segments that their owners have removed; they keep memory otherwise. For a slow timer."""
        with self._lock:
            self._forget_removed()

    def unattached(self) -> int:
        """How many slots are lent on that, as it seems, no receiver has opened yet."""
        with self._lock:
            return sum(
                bool(slot.loans) and not is_locked_by_others(segment.fd, slot.index)
                for segment in self._segments.values()
                for slot in segment.slots.values()
            )

    def close(self) -> None:
        """Borrow no more. Views that live stay valid, and their slots locked, until they end."""
        with self._lock:
            self._closed = True
            for segment in self._segments.values():
                segment.slots.clear()
            self._segments.clear()
            for table in (self._reachable, self._ended, self._to_give_back):
                table.clear()
            self._pages.close()

    def borrowed(self) -> list[dict[str, Any]]:
        """Slots that this process holds, for people: segment, slot, bytes, views, loans."""
        with self._lock:
            return [
                {
                    "segment": segment.name,
                    "slot": slot.index,
                    "nbytes": slot.nbytes,
                    "views": slot.parts,
                    "loans": sum(slot.loans.values()),
                }
                for segment in self._segments.values()
                for slot in segment.slots.values()
            ]


_attachments: weakref.WeakSet[Attachments] = weakref.WeakSet()


class _ForkedMappings(threading.local):
    """What a thread that forks has made for the child; the segments are kept, so that no descriptor is used again."""

    made: tuple[tuple[Attached, int], ...] = ()


_forking = _ForkedMappings()


def _before_fork() -> None:
    _forking.made = tuple(pair for each in list(_attachments) for pair in each.lock_for_child())


def _after_fork_in_parent() -> None:
    made, _forking.made = _forking.made, ()
    for _, copy in made:
        os.close(copy)  # the child's keeps the locks


def _after_fork_in_child() -> None:
    made, _forking.made = _forking.made, ()
    for segment, copy in made:
        os.dup2(copy, segment.fd, inheritable=False)
        os.close(copy)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
