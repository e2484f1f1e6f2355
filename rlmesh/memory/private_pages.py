"""Finds the pages of a private mapping that this process has written to.

A cached MAP_PRIVATE mapping makes receiving free: its pages stay mapped, and they show the bytes that the owner
writes into the file. But a page that was written to here is a copy that hides the file's page from then on. Such copies
must be found and dropped before the slot is reused. ``/proc/self/pagemap`` has eight bytes per page; the top byte says
whether the page is present (bit 7) or swapped out (bit 6), and whether it belongs to a file (bit 5). A copy is
present or swapped out, and does not belong to a file.

Ways to get a fresh view of a slot, milliseconds of CPU time on a 2-core virtual machine (Linux 6.18, medians, on a busy
host):

===================================================  =======  ========  =========
work per use of the slot                               1 MiB    64 MiB    512 MiB
===================================================  =======  ========  =========
cached mapping, pagemap read: never touched here       0.003      0.06       0.46
cached mapping, pagemap read: all pages mapped         0.003      0.18        5.5
the same by ioctl PAGEMAP_SCAN (Linux 6.7)             0.003      0.16        5.5
MADV_DONTNEED always                                   0.01       2.0         15
… and the faults when the pages are read again         0.04       4           34
new mapping per use, read through faults, unmapped     0.05       6           49
new mapping per use with MAP_POPULATE                  0.24      32          274
===================================================  =======  ========  =========

(MAP_POPULATE on a writable private mapping copies every page.) Therefore there is one cached mapping; the pagemap is
read when the last view is gone, for the ranges that views showed; MADV_DONTNEED is used on pages that were written to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from rlmesh.memory.native import PAGE_BYTES, Mapping, export, view_of

_PAGES_PER_READ = 1 << 17
_MAX_RUNS = 64
_COPIED = bytes(1 if top & 0xC0 and not top & 0x20 else 0 for top in range(256))
"""Maps the top byte of a pagemap entry to 1 if the page is this process's own copy, else 0."""


class PrivatePages:
    """Reads the calling process's page table; where that is not allowed, every page counts as written to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._pid = 0
        self._works: bool | None = None

    @property
    def works(self) -> bool:
        """True if the page table distinguishes copies from file pages here; found out once, with a small mapping."""
        if self._works is None:
            try:
                self._works = self._try_out()
            except OSError:
                self._works = False
        return self._works

    def any(self, address: int, nbytes: int) -> bool:
        """True if this process has written to a page of the range."""
        return next(self.runs(address, nbytes), None) is not None

    def runs(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Page-aligned ranges (address, length) that cover all pages written to; few ranges, not always minimal."""
        first = address // PAGE_BYTES
        last = -(-(address + nbytes) // PAGE_BYTES)
        if not self.works:
            if last > first:
                yield first * PAGE_BYTES, (last - first) * PAGE_BYTES
            return
        for start in range(first, last, _PAGES_PER_READ):
            copied = self._copied(start, min(_PAGES_PER_READ, last - start))
            begin, count = copied.find(1), 0
            while begin >= 0:
                count += 1
                end = copied.find(0, begin) if count < _MAX_RUNS else copied.rfind(1) + 1
                end = end if end >= 0 else len(copied)
                yield (start + begin) * PAGE_BYTES, (end - begin) * PAGE_BYTES
                begin = copied.find(1, end)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _copied(self, page: int, count: int) -> bytes:
        with self._lock:
            if self._fd < 0 or self._pid != os.getpid():
                # An inherited descriptor shows the page table of the parent.
                if self._fd >= 0:
                    os.close(self._fd)
                self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
                self._pid = os.getpid()
        entries = os.pread(self._fd, count * 8, page * 8)
        return entries[7::8].translate(_COPIED)

    def _try_out(self) -> bool:
        fd = os.memfd_create("rlmesh-private-pages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 3 * PAGE_BYTES)
            mapping = Mapping.private(fd, 0, 3 * PAGE_BYTES)
            view = view_of(export(mapping.address, mapping.nbytes, mapping))
            view[PAGE_BYTES] = view[0] + 1
            return self._copied(mapping.address // PAGE_BYTES, 3) == b"\0\1\0"
        finally:
            os.close(fd)
