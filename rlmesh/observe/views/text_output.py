"""Lines to a text stream whose reader may be slow, stopped or gone: the writer never waits for it."""

from __future__ import annotations

import os
import select
import time
from typing import TextIO

from rlmesh.observe.views.safe_text import shown

__all__ = ["Lines", "can_write"]

PIECE_BYTES = 4096
"""A pipe that is writable takes this much without blocking (PIPE_BUF)."""
FULL_BYTES = 256 * 1024
"""From this much unwritten on, there is no room for what can wait: whoever writes much asks ``ready`` before."""
STALL_S = 2.0


class Lines:
    """Writes lines to a stream, in order. What its reader does not take is kept, and nothing is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._left = bytearray()
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError, AttributeError):
            self._fd = -1

    def write(self, line: str) -> None:
        """Write a line, or keep it. Never blocks and never raises. What a terminal would obey is shown."""
        line = shown(line)
        if self._stream is None:
            return
        if self._fd < 0:
            self._write_directly(line)
            return
        self._left += (line + "\n").encode(self._stream.encoding or "utf-8", "backslashreplace")
        self.pump()

    def ready(self) -> bool:
        """Whether there is room for more; writes what the reader takes now."""
        self.pump()
        return len(self._left) < FULL_BYTES

    def pump(self) -> bool:
        """Write what can be written without blocking; whether nothing is left."""
        try:
            if self._stream is not None and self._left:
                self._stream.flush()  # What others wrote through the stream itself comes first.
            while self._stream is not None and self._left and can_write(self._fd):
                # Whole lines, since others may write to the same pipe in between: standard error, most of all.
                end = self._left.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
                del self._left[: os.write(self._fd, self._left[:end])]
        except (OSError, ValueError):  # a broken pipe, a closed file
            self._stream = None
        if self._stream is None:
            self._left.clear()
        return not self._left

    def drain(self, stall_s: float = STALL_S) -> bool:
        """Write all, or give the reader up when it took nothing for ``stall_s``. Whether it took all."""
        before, deadline = len(self._left), time.monotonic() + stall_s
        while not self.pump() and time.monotonic() < deadline:
            if len(self._left) != before:
                before, deadline = len(self._left), time.monotonic() + stall_s
            can_write(self._fd, stall_s)
        if self._left:
            self._stream = None
            self._left.clear()
            return False
        return True

    def _write_directly(self, line: str) -> None:
        assert self._stream is not None
        try:
            try:
                self._stream.write(line + "\n")
            except UnicodeEncodeError:
                self._stream.write(line.encode("ascii", "backslashreplace").decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def can_write(fd: int, wait_s: float = 0.0) -> bool:
    """Whether a small write would not block, now or within ``wait_s``; also true when writing fails."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(wait_s * 1000))
