"""A segment at its owner: the file, its memory, its table of slots, its free bytes. Not thread-safe; `pool` locks."""

from __future__ import annotations

import ctypes
import heapq
import os
from bisect import bisect_left, insort

from rlmesh.memory.layout import ENTRY_WORDS, MAGIC, MAX_SLOTS, TABLE_BYTES
from rlmesh.memory.native import PAGE_BYTES, Mapping, is_locked_by_others, try_lock, unlock


class FreeSpace:
    """The free ranges (holes) of the bytes ``[start, end)``. Sizes are not rounded here."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._holes: list[tuple[int, int]] = [(start, end - start)] if end > start else []

    def best(self, nbytes: int) -> tuple[int, int] | None:
        """Size and offset of the smallest hole that is large enough, the lowest of equal holes; None if none is.

        The smallest, since the same sizes come again, so that a slot's old place fits exactly. The lowest, since
        low bytes were used before and are mapped.
        """
        return min(((size, offset) for offset, size in self._holes if size >= nbytes), default=None)

    def take(self, nbytes: int) -> int | None:
        """Take the first bytes of the best hole and return their offset; None if no hole is large enough."""
        found = self.best(nbytes)
        if found is None:
            return None
        size, offset = found
        position = bisect_left(self._holes, (offset, 0))
        if size == nbytes:
            del self._holes[position]
        else:
            self._holes[position] = (offset + nbytes, size - nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that `take` returned.

        Raises:
            ValueError: if part of the range is free already or lies outside.
        """
        position = bisect_left(self._holes, (offset, 0))
        before = self._holes[position - 1] if position else None
        after = self._holes[position] if position < len(self._holes) else None
        if (
            nbytes <= 0
            or offset < self.start
            or offset + nbytes > self.end
            or (before is not None and sum(before) > offset)
            or (after is not None and after[0] < offset + nbytes)
        ):
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not all in use")
        if after is not None and after[0] == offset + nbytes:
            del self._holes[position]
            nbytes += after[1]
        if before is not None and sum(before) == offset:
            del self._holes[position - 1]
            offset, nbytes = before[0], before[1] + nbytes
        insort(self._holes, (offset, nbytes))

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._holes)

    @property
    def is_empty(self) -> bool:
        """True if no byte is taken."""
        return self.free_bytes == self.end - self.start


class ShmSegment:
    """A file whose pages are all allocated, so that touching them cannot cause a bus error.

    Args:
        path: the file, which must not exist.
        data_bytes: room for slots, a multiple of the page size.

    Raises:
        FileExistsError: the name is taken.
        OSError: the file system has no room; nothing is left behind.
    """

    def __init__(self, path: str, data_bytes: int) -> None:
        self.path, self.name = path, os.path.basename(path)
        self.nbytes = TABLE_BYTES + data_bytes
        self.space = FreeSpace(TABLE_BYTES, self.nbytes)
        self.idle_since = 0.0
        self._indexes = list(range(1, MAX_SLOTS + 1))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
            self.mapping = Mapping.shared(self._fd, 0, self.nbytes, writable=True)
        except BaseException:
            os.unlink(path)
            os.close(self._fd)
            raise
        self._table = (ctypes.c_uint64 * (TABLE_BYTES // 8)).from_address(self.mapping.address)
        self._table[0], self._table[1] = MAGIC, self.nbytes

    @property
    def has_index(self) -> bool:
        return bool(self._indexes)

    def take(self, nbytes: int, generation: int) -> tuple[int, int] | None:
        """Make a slot and return its index and offset; None if there is no room for it."""
        offset = self.space.take(nbytes) if self._indexes else None
        if offset is None:
            return None
        index = heapq.heappop(self._indexes)
        word = index * ENTRY_WORDS
        self._table[word + 1], self._table[word + 2] = offset, nbytes
        # The generation is written last: a borrower that sees it sees the rest.
        self._table[word] = generation
        return index, offset

    def retire(self, index: int, offset: int, nbytes: int) -> bool:
        """End a slot; False if some process still has it locked."""
        if not try_lock(self._fd, index, exclusive=True):
            return False
        self._table[index * ENTRY_WORDS] = 0
        unlock(self._fd, index)
        self.space.give(offset, nbytes)
        heapq.heappush(self._indexes, index)
        return True

    def is_attached(self, index: int) -> bool:
        """True if another process has the slot locked."""
        return is_locked_by_others(self._fd, index)

    def remove(self) -> None:
        """Unlink the file. Its memory is freed at once if no slot is in use, else with the last mapping."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        if self.space.is_empty:
            # Borrowers unmap the file only when they notice; until then their mappings must not keep the memory.
            try:
                self.mapping.free_file_pages(0, -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES)
            except OSError:
                pass  # a file system without holes: the memory is freed with the last mapping
        os.close(self._fd)
