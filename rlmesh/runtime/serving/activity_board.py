"""What a process does, for those who look from outside when it cannot answer.

A member that holds the interpreter's lock in C, or that is stopped, answers nobody. So it writes into a page of shared
memory, a file in the job's private folder, which method runs and since when, and once a second that its network loop
runs. To note a call costs two stores. An ``async def`` method is noted each time it goes on, and is not while it waits.
Times are those of the clock that all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rlmesh.runtime.process import forked

__all__ = ["ASYNC", "DEF", "INLINE", "Activity", "Board", "board_path", "does_not_answer", "link_board", "look_at"]

BEAT, PID, DEF, ASYNC, INLINE = 0, 1, 2, 4, 6
"""Words of the page: when the loop ran last, whose page it is; of the ``def`` method that began last, of the ``async
def`` method that has the loop of its kind, and of the one that has the network loop, when it began or went on,
followed by the method's number (0: none runs)."""
LATE_S = 2.5
"""The loop says once a second that it runs."""
_SIZE, _NAMES_AT, _NAME_BYTES = 4096, 256, 64
_STOPPED = "Tt"


class Board:
    """The page of this process.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _SIZE)
            self._page = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        self.words = memoryview(self._page).cast("Q")
        self.words[PID] = os.getpid()
        self._names: dict[str, int] = {}
        self._lock = threading.Lock()
        self.beat()
        os.replace(draft, path)
        forked.forget_in_children(self)

    def forked(self) -> None:
        """In a forked child, whose copy of the page is the parent's page: what ends in the child runs on there."""
        self.words = memoryview(bytearray(_SIZE)).cast("Q")
        self._page = mmap.mmap(-1, _SIZE)
        self._lock = threading.Lock()

    def beat(self) -> None:
        """The loop runs."""
        self.words[BEAT] = time.perf_counter_ns()

    def number_of(self, name: str) -> int:
        """Of a method, which is written down the first time. Names that have no room share the last number."""
        with self._lock:
            number = self._names.get(name)
            if number is None:
                number = min(len(self._names) + 1, (_SIZE - _NAMES_AT) // _NAME_BYTES)
                start = _NAMES_AT + (number - 1) * _NAME_BYTES
                text = name.encode("utf-8", "replace")[:_NAME_BYTES]
                self._page[start : start + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")
                self._names[name] = number
            return number


@dataclass(frozen=True, slots=True)
class Activity:
    """What a page said.

    Attributes:
        pid: whose it is.
        silent_s: since its loop ran last.
        method: that runs; empty if none is known.
        since_s: since it began or, of an ``async def`` method, went on.
    """

    pid: int
    silent_s: float
    method: str = ""
    since_s: float = 0.0


def board_path(socket_dir: str | Path, name: str) -> Path:
    """Where the page of a member is, by its name."""
    return Path(socket_dir) / f"doing-{name.replace(':', '-')}"


def link_board(socket_dir: str, owner: str, name: str) -> None:
    """A member that lives in another one's process has the same page."""
    path = board_path(socket_dir, name)
    try:
        path.unlink(missing_ok=True)
        os.link(board_path(socket_dir, owner), path)
    except OSError:
        pass


def look_at(path: Path) -> Activity | None:
    """Read a page; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            page = os.read(fd, _SIZE)
        finally:
            os.close(fd)
    except OSError:
        return None
    if len(page) < _SIZE:
        return None
    now_ns = time.perf_counter_ns()
    words = memoryview(page).cast("Q")
    running = [(words[at], words[at + 1]) for at in (DEF, ASYNC) if words[at + 1]]
    if not running and words[INLINE + 1]:
        running = [(words[INLINE], words[INLINE + 1])]
    method, since_s = "", 0.0
    if running:
        # Of a method that waits on its thread, and one that has gone on since, the latter is known to have had the
        # interpreter later. The library's own, on the network loop, may only have been interrupted by either.
        began_ns, number = max(running)
        start = _NAMES_AT + (number - 1) * _NAME_BYTES
        method = page[start : start + _NAME_BYTES].rstrip(b"\0").decode("utf-8", "replace")
        since_s = max(0.0, (now_ns - began_ns) / 1e9)
    return Activity(words[PID], max(0.0, (now_ns - words[BEAT]) / 1e9), method, since_s)


def does_not_answer(state: str, pid: int, seen: Activity | None) -> str:
    """Why a process does not answer, for people; empty if it does, or if nothing is known.

    Args:
        state: the letter that the kernel gives for it.
        pid: of the process that is meant.
    """
    known = seen if seen is not None and seen.pid == pid else None
    if state in tuple(_STOPPED):
        return "stopped" + (f" for {known.silent_s:.0f} s" if known is not None else "")
    if known is None or known.silent_s < LATE_S:
        return ""
    if known.method:
        return f"busy in {known.method} for {known.since_s:.0f} s, does not answer"
    return f"does not answer for {known.silent_s:.0f} s"
