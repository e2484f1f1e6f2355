"""Replies that a caller was sent and has not taken in: how many bytes a member holds for one that does not read.

The caller says, every few MiB, how many answers it has taken in (`Taken`). A member that has sent it more than
`LIMIT_BYTES` beyond that sets the caller's next calls aside instead of running them, until the caller has caught up.
One that takes in nothing for `CUT_OFF_S` is cut off.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from typing import TYPE_CHECKING, Any

from rlmesh.runtime.process import clock
from rlmesh.wire.envelope import Frames

if TYPE_CHECKING:
    from rlmesh.runtime.serving.incoming import IncomingCall

LIMIT_BYTES = 64 << 20
CUT_OFF_S = 60.0
LOOK_S = 1.0
LARGE_BYTES = 64 << 10
"""Smaller answers are not counted: so many of them are bounded by the calls that a caller may have on their way."""
TELL_BYTES = 8 << 20
"""A caller tells what it has taken in each time it is so much."""


def is_large(frames: Frames) -> bool:
    """Whether an answer counts. Both sides ask it of the same frames."""
    return len(frames) > 1 or (len(frames) == 1 and len(frames[0]) >= LARGE_BYTES)


def nbytes_of(frames: Frames) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


class Backlog:
    """Of one connection, both directions: what this side has sent, and what it has taken in."""

    __slots__ = ("_aside", "_lock", "_owed", "_sent", "_taken", "_untold_bytes", "moved_at", "owed_bytes", "watched")

    def __init__(self) -> None:
        self._sent = 0
        self._owed: deque[tuple[int, int]] = deque()
        self.owed_bytes = 0
        self._lock = allocate_lock()
        self._aside: list[Any] = []
        self.moved_at = clock.now()
        """When the peer last took something in, or had nothing to take."""
        self.watched = False
        self._taken = self._untold_bytes = 0

    # Of what this side answers: any thread.

    def sent(self, frames: Frames) -> None:
        """One answer goes out."""
        if not is_large(frames):
            return
        nbytes = nbytes_of(frames)
        with self._lock:
            if not self._owed:
                self.moved_at = clock.now()
            self._sent += 1
            self._owed.append((self._sent, nbytes))
            self.owed_bytes += nbytes

    def sets_aside(self, incoming: IncomingCall) -> bool:
        """Keep a call for later if its caller is behind."""
        if self.owed_bytes < LIMIT_BYTES:
            return False
        with self._lock:
            if self.owed_bytes < LIMIT_BYTES:
                return False
            self._aside.append(incoming)
            return True

    def told(self, count: int) -> list[IncomingCall]:
        """The peer has taken in so many answers; gives the calls that may run again."""
        with self._lock:
            self.moved_at = clock.now()
            while self._owed and self._owed[0][0] <= count:
                self.owed_bytes -= self._owed.popleft()[1]
            if self.owed_bytes >= LIMIT_BYTES // 2:
                return []
            aside, self._aside = self._aside, []
            return aside

    @property
    def is_behind(self) -> bool:
        return self.owed_bytes >= LIMIT_BYTES

    def is_stuck(self, now: float) -> bool:
        return self.is_behind and now - self.moved_at >= CUT_OFF_S

    def describe(self, now: float) -> str:
        with self._lock:
            return (
                f"it has not taken in {len(self._owed)} answers with {self.owed_bytes / 2**20:,.0f} MiB, and none for "
                f"{now - self.moved_at:.0f} s; {len(self._aside)} of its calls wait. Is it stopped, or is its loop "
                "blocked?"
            )

    # Of what the peer answers: on the loop.

    def took(self, frames: Frames) -> int:
        """One answer was taken in; how many there were if the peer should be told now, else 0."""
        if not is_large(frames):
            return 0
        self._taken += 1
        self._untold_bytes += nbytes_of(frames)
        if self._untold_bytes < TELL_BYTES:
            return 0
        self._untold_bytes = 0
        return self._taken
