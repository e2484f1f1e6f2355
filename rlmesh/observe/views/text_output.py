"""Writing lines to a text stream whose reader may be slow, stopped or gone: the writer never waits for it."""

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
"""Unwritten bytes beyond which optional lines must wait: callers that write much check ``ready`` first."""
STALL_S = 2.0


class Lines:
    """Writes lines to a stream, in order. Lines that the reader does not take are buffered; none is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._left = bytearray()
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError, AttributeError):
            self._fd = -1

    def write(self, line: str) -> None:
        """Write or buffer a line. Never blocks and never raises. Control characters are made visible."""
        line = shown(line)
        if self._stream is None:
            return
        if self._fd < 0:
            self._write_directly(line)
            return
        self._left += (line + "\n").encode(self._stream.encoding or "utf-8", "backslashreplace")
        self.pump()

    def ready(self) -> bool:
        """True if there is room for more lines; first writes as much as the reader takes."""
        self.pump()
        return len(self._left) < FULL_BYTES

    def pump(self) -> bool:
        """Write as much as possible without blocking; True if nothing is left."""
        try:
            if self._stream is not None and self._left:
                self._stream.flush()  # other writers' text in the stream comes first
            while self._stream is not None and self._left and can_write(self._fd):
                # Write whole lines: other processes may write to the same pipe in between, above all if it is standard
                # error.
                end = self._left.rfind(b"\n", 0, PIECE_BYTES) + 1 or PIECE_BYTES
                del self._left[: os.write(self._fd, self._left[:end])]
        except (OSError, ValueError):  # a broken pipe, a closed file
            self._stream = None
        if self._stream is None:
            self._left.clear()
        return not self._left

    def drain(self, stall_s: float = STALL_S) -> bool:
        """Write everything, or give up when the reader took nothing for ``stall_s``; True if everything was written."""
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
    """True if a small write would not block, now or within ``wait_s``, or if writing would fail."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(wait_s * 1000))
