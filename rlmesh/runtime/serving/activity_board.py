"""The activity board: a page that shows other processes what a member does when it cannot answer.

A member that holds the interpreter's lock in C, or that is stopped, does not answer. So it writes to a page of shared
memory, a file in the job's private folder: which method runs and since when, and once a second that its network loop
runs. Recording a call takes two stores. An ``async def`` method is recorded each time it resumes, and erased while it
waits. Times are of the clock that all processes of a machine share.
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
"""Indexes of the page's words: the time of the loop's last beat, the process id; then, for three kinds of methods, the
time when the method began or resumed, followed by its number (0: none runs). The kinds are the last ``def`` method that
began, the ``async def`` method that runs on the users' loop, and the ``async def`` method that runs on the network
loop."""
LATE_S = 2.5
"""Age of the last beat from which a process counts as silent; the loop beats once a second."""
_SIZE, _NAMES_AT, _NAME_BYTES = 4096, 256, 64
_STOPPED = "Tt"


class Board:
    """The activity page of this process.

    Raises:
        OSError: the page cannot be made.
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
        """Replace the page in a forked child, which shares the parent's page.

        A method that ends in the child still runs in the parent, so the child must not erase it there.
        """
        self.words = memoryview(bytearray(_SIZE)).cast("Q")
        self._page = mmap.mmap(-1, _SIZE)
        self._lock = threading.Lock()

    def beat(self) -> None:
        """Record that the loop runs."""
        self.words[BEAT] = time.perf_counter_ns()

    def number_of(self, name: str) -> int:
        """The number of a method, whose name is written to the page the first time.

        When the page is full, further names share the last number.
        """
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
    """The content of an activity page.

    Attributes:
        pid: the process of the page.
        silent_s: seconds since its loop's last beat.
        method: the running method; empty if no method is known to run.
        since_s: seconds since the method began or, if it is an ``async def`` method, resumed.
    """

    pid: int
    silent_s: float
    method: str = ""
    since_s: float = 0.0


def board_path(socket_dir: str | Path, name: str) -> Path:
    """The path of a member's page."""
    return Path(socket_dir) / f"doing-{name.replace(':', '-')}"


def link_board(socket_dir: str, owner: str, name: str) -> None:
    """Give a member that lives in another member's process the same page."""
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
        # Report the method that began or resumed last: it had the interpreter last, while the other may only wait on
        # its thread. A method of the library on the network loop counts only if no method of the user runs, since each
        # may have interrupted the other.
        began_ns, number = max(running)
        start = _NAMES_AT + (number - 1) * _NAME_BYTES
        method = page[start : start + _NAME_BYTES].rstrip(b"\0").decode("utf-8", "replace")
        since_s = max(0.0, (now_ns - began_ns) / 1e9)
    return Activity(words[PID], max(0.0, (now_ns - words[BEAT]) / 1e9), method, since_s)


def does_not_answer(state: str, pid: int, seen: Activity | None) -> str:
    """The reason, for people, why a process does not answer; empty if it answers, or if nothing is known.

    Args:
        state: the kernel's letter of the process's state.
        pid: the process.
        seen: the content of its page; ignored if the page belongs to another process.
    """
    known = seen if seen is not None and seen.pid == pid else None
    if state in tuple(_STOPPED):
        return "stopped" + (f" for {known.silent_s:.0f} s" if known is not None else "")
    if known is None or known.silent_s < LATE_S:
        return ""
    if known.method:
        return f"busy in {known.method} for {known.since_s:.0f} s, does not answer"
    return f"does not answer for {known.silent_s:.0f} s"
