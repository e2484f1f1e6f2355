"""Bounds the replies that a member has sent to a caller and that the caller has not received yet.

The caller reports, every few MiB, how many replies it has received (`TakenReplies`). A member that has sent more than
`LIMIT_BYTES` beyond that sets the caller's next calls aside instead of running them, until the caller has caught up.
A caller that receives nothing for `CUT_OFF_S` is disconnected.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from typing import Any

from rlmesh.runtime.process import clock
from rlmesh.wire.envelope import Frames

LIMIT_BYTES = 64 << 20
CUT_OFF_S = 60.0
CHECK_S = 1.0
LARGE_BYTES = 64 << 10
"""Smaller replies are not counted: the number of calls that a caller may have in flight bounds them."""
TELL_BYTES = 8 << 20
"""Received bytes after which a caller sends the next report."""


def is_large(frames: Frames) -> bool:
    """True if a reply is counted; both sides decide by the same frames."""
    return len(frames) > 1 or (len(frames) == 1 and len(frames[0]) >= LARGE_BYTES)


def nbytes_of(frames: Frames) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


class Backlog:
    """The replies of a connection, in both directions: sent by this side, and received by this side."""

    __slots__ = (
        "_aside", "_lock", "_received", "_sent", "_unreceived", "_unreported_bytes", "moved_at", "unreceived_bytes",
        "watched",
    )  # fmt: skip

    def __init__(self) -> None:
        self._sent = 0
        self._unreceived: deque[tuple[int, int]] = deque()
        """Number and bytes of each sent reply that the peer has not reported as received."""
        self.unreceived_bytes = 0
        self._lock = allocate_lock()
        self._aside: list[Any] = []
        self.moved_at = clock.now()
        """The time when the peer last received a reply, or had none to receive."""
        self.watched = False
        self._received = self._unreported_bytes = 0

    # Replies of this side; any thread.

    def sent(self, frames: Frames) -> None:
        """Count a reply that this side sends."""
        if not is_large(frames):
            return
        nbytes = nbytes_of(frames)
        with self._lock:
            if not self._unreceived:
                self.moved_at = clock.now()
            self._sent += 1
            self._unreceived.append((self._sent, nbytes))
            self.unreceived_bytes += nbytes

    def set_aside(self, incoming: Any) -> bool:
        """Set a call aside if its caller is behind; False if it is not."""
        if self.unreceived_bytes < LIMIT_BYTES:
            return False
        with self._lock:
            if self.unreceived_bytes < LIMIT_BYTES:
                return False
            self._aside.append(incoming)
            return True

    def on_taken(self, count: int) -> list[Any]:
        """Handle the peer's report that it has received ``count`` replies; returns the calls that may run now."""
        with self._lock:
            self.moved_at = clock.now()
            while self._unreceived and self._unreceived[0][0] <= count:
                self.unreceived_bytes -= self._unreceived.popleft()[1]
            if self.unreceived_bytes >= LIMIT_BYTES // 2:
                return []
            aside, self._aside = self._aside, []
            return aside

    @property
    def is_behind(self) -> bool:
        return self.unreceived_bytes >= LIMIT_BYTES

    def is_stuck(self, now: float) -> bool:
        return self.is_behind and now - self.moved_at >= CUT_OFF_S

    def describe(self, now: float) -> str:
        with self._lock:
            return (
                f"it has not received {len(self._unreceived)} answers with {self.unreceived_bytes / 2**20:,.0f} MiB, "
                f"and none for {now - self.moved_at:.0f} s; {len(self._aside)} of its calls wait. Is it stopped, or is "
                "its loop blocked?"
            )

    # Replies of the peer; on the loop.

    def on_received(self, frames: Frames) -> int:
        """Count a received reply; returns the number of received replies if it should be reported now, else 0."""
        if not is_large(frames):
            return 0
        self._received += 1
        self._unreported_bytes += nbytes_of(frames)
        if self._unreported_bytes < TELL_BYTES:
            return 0
        self._unreported_bytes = 0
        return self._received
