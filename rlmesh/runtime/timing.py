"""Where the time of calls goes: in the method, in a queue, waiting for a core, or in rlmesh itself."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class CallStats:
    """Where the caller's time went in the calls of one method of one role, summed over one report.

    ``overhead_s`` is the time in rlmesh itself: ``wall_s`` minus what the slowest member spent in the method
    and in methods queued before it, minus the time that threads of both sides were runnable without a core.
    ``share_s`` is ``wall_s`` with the time in which n calls were pending at once counted as 1/n for each, so
    that the shares of all calls add up to the time in which any was pending; 0 where it was not measured.
    """

    role: str
    method: str
    calls: int
    wall_s: float
    method_s: float
    queued_s: float
    run_queue_s: float
    overhead_s: float
    slowest_rank: int
    share_s: float = 0.0


_RECENT_NS = 5_000_000


class RunQueueMeter:
    """Nanoseconds that threads of this process were runnable but had no core (``schedstat``, second field).

    On a machine with fewer cores than busy processes this delay is the machine's, not rlmesh's.
    """

    def __init__(self, thread_ids: Iterable[int] = ()) -> None:
        self._files: list[int] = []
        self._last = self._read_at = 0
        for thread_id in thread_ids:
            self.add(thread_id)

    def add(self, thread_id: int) -> None:
        try:
            self._files.append(os.open(f"/proc/self/task/{thread_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass  # A kernel without scheduler statistics: the delay then counts as rlmesh's.

    def recent_ns(self, now_ns: int) -> int:
        """`read_ns` at most five milliseconds before ``now_ns`` (of `time.perf_counter_ns`): many short calls share
        one look at the kernel's counters."""
        if now_ns - self._read_at > _RECENT_NS:
            self._last = self.read_ns()
            self._read_at = now_ns
        return self._last

    def read_ns(self) -> int:
        total = 0
        for file in self._files:
            try:
                total += int(os.pread(file, 96, 0).split()[1])
            except (OSError, IndexError, ValueError):
                continue
        return total

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def __del__(self) -> None:
        self.close()


class _ThreadMeter(threading.local):
    """Each thread's own meter, opened at its first use."""

    def __init__(self) -> None:
        self.meter = RunQueueMeter([threading.get_native_id()])
        self.last_ns = self.meter.read_ns()


_own = _ThreadMeter()


def own_run_queue_ns() -> int:
    """Nanoseconds that the calling thread was runnable without a core, ever."""
    return _own.meter.recent_ns(time.perf_counter_ns())


def own_run_queue_since_last_ns(now_ns: int = 0) -> int:
    """The same since this thread called this function before; ``now_ns`` is what `time.perf_counter_ns` just gave."""
    own = _own
    now = own.meter.recent_ns(now_ns or time.perf_counter_ns())
    last, own.last_ns = own.last_ns, now
    return now - last


def thread_ids_named(prefix: str) -> list[int]:
    """Threads of this process by the name that the kernel shows, such as ZeroMQ's own ``ZMQbg/IO/0``."""
    found = []
    for thread_id in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread_id}/comm") as file:
                if file.read().startswith(prefix):
                    found.append(int(thread_id))
        except OSError:
            continue
    return found


class CallRecord(NamedTuple):
    """One finished call to one or more members; times in ns of `time.perf_counter_ns`.

    ``executed_ns``, ``queued_ns`` and ``run_queue_ns`` are of the slowest member, which ``member`` names.
    """

    role: str
    method: str
    started_ns: int
    ended_ns: int
    caller_run_queue_ns: int
    member: str
    executed_ns: int
    queued_ns: int
    run_queue_ns: int


class CallGroup:
    """The calls of one group call that are still on their way; together they make one record."""

    __slots__ = ("left", "slowest")

    def __init__(self, members: int) -> None:
        self.left = members
        self.slowest: tuple[str, int, int, int] | None = None

    def member_done(self, times: tuple[str, int, int, int] | None) -> tuple[str, int, int, int] | None:
        """Name, executed, queued and run-queue ns of one member, or None if it failed without an answer.

        Returns:
            The slowest member's, once the last one is done.
        """
        if times is not None and (self.slowest is None or times[1] + times[2] > self.slowest[1] + self.slowest[2]):
            self.slowest = times
        self.left -= 1
        return self.slowest if self.left == 0 else None


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    wall_ns: int = 0
    method_ns: int = 0
    queued_ns: int = 0
    run_queue_ns: int = 0
    overhead_ns: int = 0
    share_ns: float = 0.0
    slowest: dict[str, int] = field(default_factory=dict)


_EXACT_CALLS = 4_000
"""So many calls between two reports share the time out exactly; where there are more, they are summed in bulk: the
exact way would cost a busy caller a third of its calls."""


FinishedCall: TypeAlias = tuple[str, str, int, int, int, str, int, int, int]
"""As `CallRecord`, but with the name of (one of) the called members instead of their role."""


class CallLedger:
    """Finished calls, summed by role and method when somebody takes the sums.

    A finished call costs one tuple; the arithmetic is done when the sums are taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[FinishedCall] = []
        self._wakes: list[tuple[str, str, int, int]] = []
        self._sums: dict[tuple[str, str], _Sum] = {}

    def add(self, record: FinishedCall) -> None:
        self._records.append(record)
        if len(self._records) > _EXACT_CALLS:
            self._fold(exact=False)

    def add_wake(self, role: str, method: str, lag_ns: int, run_queue_ns: int) -> None:
        """Time from the arrival of an answer until the thread that waited for it ran."""
        self._wakes.append((role, method, lag_ns, run_queue_ns))
        if len(self._wakes) > _EXACT_CALLS:
            self._fold()

    def take(self) -> tuple[CallStats, ...]:
        self._fold()
        with self._lock:
            sums, self._sums = self._sums, {}
        return tuple(_stats(role, method, total) for (role, method), total in sums.items() if total.calls)

    def _fold(self, *, exact: bool = True) -> None:
        with self._lock:
            finished, self._records = self._records, []
            wakes, self._wakes = self._wakes, []
            if not exact:
                self._fold_in_bulk(finished)
                finished = []
            records = [CallRecord(call[0].partition(":")[0], *call[1:]) for call in finished]
            for record, share_ns in zip(records, shares_ns(records), strict=True):
                total = self._sums.setdefault((record.role, record.method), _Sum())
                wall_ns = record.ended_ns - record.started_ns
                run_queue_ns = record.caller_run_queue_ns + record.run_queue_ns
                total.calls += 1
                total.wall_ns += wall_ns
                total.method_ns += record.executed_ns
                total.queued_ns += record.queued_ns
                total.run_queue_ns += run_queue_ns
                total.overhead_ns += max(0, wall_ns - record.executed_ns - record.queued_ns - run_queue_ns)
                total.share_ns += share_ns
                total.slowest[record.member] = total.slowest.get(record.member, 0) + 1
            for role, method, lag_ns, run_queue_ns in wakes:
                total = self._sums.setdefault((role, method), _Sum())
                total.wall_ns += lag_ns
                total.run_queue_ns += run_queue_ns
                total.overhead_ns += max(0, lag_ns - run_queue_ns)

    def _fold_in_bulk(self, finished: Sequence[FinishedCall]) -> None:
        """Sums of whole columns. The time in which any call was pending is taken as the span from first to last, or as
        what the calls took where that is less; each call has its share by the time that it took."""
        groups: dict[tuple[str, str], list[FinishedCall]] = {}
        for call in finished:
            groups.setdefault(call[:2], []).append(call)
        columns = {key: tuple(zip(*calls, strict=True)) for key, calls in groups.items()}
        walls = {key: sum(column[3]) - sum(column[2]) for key, column in columns.items()}
        span_ns = max(call[3] for call in finished) - min(call[2] for call in finished)
        share = min(1.0, span_ns / max(1, sum(walls.values())))
        for (name, method), (_, _, _, _, caller_ns, members, executed, queued, run_queue) in columns.items():
            wall_ns, method_ns, queued_ns = walls[name, method], sum(executed), sum(queued)
            run_queue_ns = sum(caller_ns) + sum(run_queue)
            total = self._sums.setdefault((name.partition(":")[0], method), _Sum())
            total.calls += len(members)
            total.wall_ns += wall_ns
            total.method_ns += method_ns
            total.queued_ns += queued_ns
            total.run_queue_ns += run_queue_ns
            total.overhead_ns += max(0, wall_ns - method_ns - queued_ns - run_queue_ns)
            total.share_ns += wall_ns * share
            for member, times in Counter(members).items():
                total.slowest[member] = total.slowest.get(member, 0) + times


def shares_ns(records: Sequence[CallRecord]) -> list[float]:
    """Each call's share of the time in which any was pending: while n are pending, each gets 1/n of it."""
    events = sorted(
        [(record.started_ns, 1, number) for number, record in enumerate(records)]
        + [(record.ended_ns, -1, number) for number, record in enumerate(records)]
    )
    shares = [0.0] * len(records)
    clock = 0.0  # Runs at 1/n of real time while n calls are pending.
    pending = 0
    before_ns = 0
    for at_ns, change, number in events:
        if pending:
            clock += (at_ns - before_ns) / pending
        before_ns = at_ns
        pending += change
        shares[number] = clock - shares[number] if change < 0 else clock
    return shares


def _stats(role: str, method: str, total: _Sum) -> CallStats:
    slowest = max(total.slowest, key=total.slowest.__getitem__, default="")
    rank = slowest.rpartition(":")[2]
    return CallStats(
        role=role,
        method=method,
        calls=total.calls,
        wall_s=total.wall_ns / 1e9,
        method_s=total.method_ns / 1e9,
        queued_s=total.queued_ns / 1e9,
        run_queue_s=total.run_queue_ns / 1e9,
        overhead_s=total.overhead_ns / 1e9,
        slowest_rank=int(rank) if rank.isdigit() else 0,
        share_s=total.share_ns / 1e9,
    )
