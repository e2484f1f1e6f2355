"""What this process was seen to call: the edges that leave it in the job's graph, and, if asked for, each single call.

An ended call costs one tuple; the sums are made when somebody takes them, or when many tuples wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlmesh.wire.codec import size_bytes
from rlmesh.wire.envelope import Frames

FOLD_AT = 4_000

EndedCall: TypeAlias = tuple[str, str, int, int, int, bool, int, int, int, int]
"""One call to one member: member, method, call number, start and end (ns of `time.perf_counter_ns`), whether it was
answered, ns in the method and ns queued before it at the member, bytes sent and received. A plain tuple, since there
is one for every call."""


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """Calls of one method of one member, summed. ``failed`` of them got no answer."""

    callee: str
    method: str
    calls: int
    failed: int
    wall_s: float
    method_s: float
    queued_s: float
    sent_bytes: int
    received_bytes: int

    def plus(self, other: EdgeStats) -> EdgeStats:
        """Both together; they are of the same method of the same member."""
        return EdgeStats(
            self.callee, self.method, self.calls + other.calls, self.failed + other.failed,
            self.wall_s + other.wall_s, self.method_s + other.method_s, self.queued_s + other.queued_s,
            self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes,
        )  # fmt: skip


def message_bytes(frames: Frames) -> int:
    """Bytes of a message's payload."""
    return len(frames[0]) if len(frames) == 1 else size_bytes(frames)


class CallWatch:
    """The ended calls of one runtime. ``note`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[EndedCall] = []
        self._sums: dict[tuple[str, str], tuple[int, ...]] = {}
        self.trace: Callable[[Sequence[EndedCall]], None] | None = None
        """Is given the single calls as well, some time after they ended."""

    def note(self, call: EndedCall) -> None:
        self._ended.append(call)
        if len(self._ended) > FOLD_AT:
            self.fold()

    def take(self) -> tuple[EdgeStats, ...]:
        """The sums since the last take, without calls to rlmesh's own processes, whose names begin with ``@``."""
        self.fold()
        with self._lock:
            sums, self._sums = self._sums, {}
        return tuple(
            EdgeStats(callee, method, calls, failed, wall / 1e9, executed / 1e9, queued / 1e9, sent, received)
            for (callee, method), (calls, failed, wall, executed, queued, sent, received) in sums.items()
        )

    def fold(self) -> None:
        """Sum up what ended, and hand it to ``trace``."""
        with self._lock:
            ended, self._ended = self._ended, []
            groups: dict[tuple[str, str], list[EndedCall]] = {}
            for call in ended:
                if not call[0].startswith("@"):
                    groups.setdefault(call[:2], []).append(call)
            for key, calls in groups.items():
                # Whole columns at once: a busy caller ends 100,000 calls a second.
                _, _, _, started, finished, answered, executed, queued, sent, received = zip(*calls, strict=True)
                wall_ns = sum(finished) - sum(started)
                times = (wall_ns, sum(executed), sum(queued))
                new = (len(calls), len(calls) - sum(answered), *times, sum(sent), sum(received))
                old = self._sums.get(key, (0,) * len(new))
                self._sums[key] = tuple(map(int.__add__, old, new))
        if self.trace is not None and ended:
            self.trace(ended)
