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

WEIGHT = 16
"""Of small messages one in so many is measured and counts so often; large ones are all measured."""
_SPREAD, _CHOSEN = 0x9E3779B1, 0xF0000000
"""Which ones: call numbers times the golden ratio, so that calls in turn to several members are all met."""
FOLD_AT = 4_000

EndedCall: TypeAlias = tuple[str, str, int, int, int, bool, int, int, int, int]
"""One call to one member: member, method, call number, start and end (ns of `time.perf_counter_ns`), whether it was
answered, ns in the method and ns queued before it at the member, bytes sent and received. A plain tuple, since there
is one for every call."""


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """Calls of one method of one member, summed. ``failed`` of them got no answer. Bytes of small messages are
    estimated from a sample."""

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


def message_bytes(call_id: int, frames: Frames) -> int:
    """Bytes of a message as they count here."""
    if len(frames) > 1:
        return size_bytes(frames)
    return 0 if call_id * _SPREAD & _CHOSEN or not frames else len(frames[0]) * WEIGHT


class CallWatch:
    """The ended calls of one runtime. ``note`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[EndedCall] = []
        self._sums: dict[tuple[str, str], list[int]] = {}
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
            for callee, method, _, started_ns, ended_ns, answered, executed_ns, queued_ns, sent, received in ended:
                total = self._sums.get((callee, method))
                if total is None:
                    if callee.startswith("@"):
                        continue
                    total = self._sums[callee, method] = [0] * 7
                total[0] += 1
                total[2] += ended_ns - started_ns
                total[3] += executed_ns
                if not answered:
                    total[1] += 1
                if queued_ns:
                    total[4] += queued_ns
                if sent:
                    total[5] += sent
                if received:
                    total[6] += received
        if self.trace is not None and ended:
            self.trace(ended)
