"""Requests to a driver to stop its job, from signal handlers and other threads."""

from __future__ import annotations

import os
import threading

from rlmesh.runtime.process.forked import forget_in_children


class Interrupt:
    """Asks a session to stop: the first request with grace, the second at once. Safe in signal handlers and threads.

    ``notice`` asks for a stop of all ranks at the same step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.noticed = ""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Reentrant: a signal handler may run while this thread is inside.
        self._lock = threading.RLock()
        self._closed = False
        forget_in_children(self)

    def forked(self) -> None:
        """In a forked child: close, because the session belongs to the parent."""
        self._lock = threading.RLock()
        self.close()

    def fileno(self) -> int:
        return self._read

    def ask(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self.count += 1
            self.reason = self.reason or reason
            self.wake()

    def notice(self, reason: str) -> None:
        with self._lock:
            self.noticed = self.noticed or reason
            self.wake()

    def wake(self) -> None:
        """Wake a ``select`` on ``fileno()``."""
        with self._lock:
            if not self._closed:
                try:
                    os.write(self._write, b"x")
                except BlockingIOError:
                    pass

    def clear(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._read)
            os.close(self._write)
