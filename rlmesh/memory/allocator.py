"""The free bytes of a segment: best-fit allocation; adjacent free ranges are merged. No I/O."""

from __future__ import annotations

from bisect import bisect_left, insort


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
