"""Standard output and error of a member: printing never fails, and never ends the member.

Both are the member's log file. When the disk is full, or the file has reached the process's size limit, output
is lost: the member goes on, the job gets one alarm, and the log notes how much is missing as soon as it can be written
again. Characters that UTF-8 cannot encode are written as escapes.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

__all__ = ["OwnOutput", "protect", "tell_losses"]

_LOSSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS})
_replaced: list[object] = []
"""The interpreter's own streams, which other code may hold; stored, since closing them would only warn."""


class OwnOutput(io.RawIOBase):
    """A stream to a descriptor whose writes always succeed."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__()
        self._fd, self.name, self.mode = fd, name, "wb"
        self._lost = 0
        self._why = ""
        self._pid = os.getpid()
        self.on_loss: Callable[[str], None] | None = None
        """Called once when output is lost, with the reason."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(view)
        try:
            if self._lost:
                note = f"\n[{self._lost} bytes that were printed here are lost: {self._why}]\n".encode()
                if os.write(self._fd, note) == len(note):
                    self._lost = 0
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            if error.errno not in _LOSSES:
                raise
            self._lost += len(view)
            self._lose(error.strerror or str(error))
        return size

    def _lose(self, why: str) -> None:
        first, self._why = not self._why, why
        tell, self.on_loss = (self.on_loss, None) if os.getpid() == self._pid else (None, self.on_loss)
        if first and tell is not None:
            tell(f"what it prints is lost, since its log cannot be written: {why}. It goes on")


def protect() -> None:
    """Replace this process's standard output and error by such streams."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        try:
            old.flush()
        except (OSError, ValueError, AttributeError):
            pass
        _replaced.append(old)
        raw = OwnOutput(fd, f"<{name}>")
        # The text layer passes each write on at once: a process that is killed loses nothing.
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def tell_losses(listener: Callable[[str], None]) -> None:
    """Call the listener on the first loss of output of either stream."""
    reported: list[str] = []

    def tell_once(text: str) -> None:
        if not reported:
            reported.append(text)
            listener(text)

    for stream in (sys.stdout, sys.stderr):
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, OwnOutput):
            raw.on_loss = tell_once
