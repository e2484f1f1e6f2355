"""Where the time of calls goes: in the method, in a queue, waiting for a core, or in rlmesh itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field


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


_RECENT_NS = 1_000_000


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

    def recent_ns(self) -> int:
        """`read_ns` at most a millisecond old: many short calls share one look at the kernel's counters."""
        now = time.perf_counter_ns()
        if now - self._read_at > _RECENT_NS:
            self._last = self.read_ns()
            self._read_at = now
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
    return _own.meter.recent_ns()


def own_run_queue_since_last_ns() -> int:
    """The same since this thread called this function before."""
    now = _own.meter.recent_ns()
    last, _own.last_ns = _own.last_ns, now
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


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    wall_ns: int = 0
    method_ns: int = 0
    queued_ns: int = 0
    run_queue_ns: int = 0
    overhead_ns: int = 0
    share_ns: float = 0.0
    slowest: dict[int, int] = field(default_factory=dict)


class CallLedger:
    """Sums of call times by role and method, until somebody takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], _Sum] = {}
        # A clock that runs at 1/n of real time while n calls are pending: the difference of two readings is a
        # call's share of the time in which any call was pending.
        self._pending = 0
        self._shared_ns = 0.0
        self._read_at = 0

    def shared_clock(self, change: int) -> float:
        """Read the shared clock (ns) as a call begins (+1) or ends (-1)."""
        with self._lock:
            now = time.perf_counter_ns()
            if self._pending:
                self._shared_ns += (now - self._read_at) / self._pending
            self._read_at = now
            self._pending += change
            return self._shared_ns

    def add(self, timer: GroupTimer) -> None:
        slowest = timer.slowest
        if slowest is None:
            return
        own = timer.caller_run_queue_ns + slowest.run_queue_ns
        spent = slowest.executed_ns + slowest.queued_ns
        with self._lock:
            total = self._sums.setdefault((timer.role, timer.method), _Sum())
            total.calls += 1
            total.wall_ns += timer.wall_ns
            total.method_ns += slowest.executed_ns
            total.queued_ns += slowest.queued_ns
            total.run_queue_ns += own
            total.overhead_ns += max(0, timer.wall_ns - spent - own)
            total.share_ns += timer.share_ns
            rank = slowest.name.rpartition(":")[2]
            number = int(rank) if rank.isdigit() else 0
            total.slowest[number] = total.slowest.get(number, 0) + 1

    def add_wake(self, role: str, method: str, lag_ns: int, run_queue_ns: int) -> None:
        """Time from the arrival of an answer until the thread that waited for it ran."""
        with self._lock:
            total = self._sums.setdefault((role, method), _Sum())
            total.wall_ns += lag_ns
            total.run_queue_ns += run_queue_ns
            total.overhead_ns += max(0, lag_ns - run_queue_ns)

    def take(self) -> tuple[CallStats, ...]:
        with self._lock:
            sums, self._sums = self._sums, {}
        return tuple(
            CallStats(
                role, method, s.calls, s.wall_ns / 1e9, s.method_ns / 1e9, s.queued_ns / 1e9, s.run_queue_ns / 1e9,
                s.overhead_ns / 1e9, max(s.slowest, key=s.slowest.__getitem__, default=0), s.share_ns / 1e9,
            )
            for (role, method), s in sums.items()
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemberTime:
    """Times of one member's reply; ``name`` such as ``ACTOR:1``."""

    name: str
    executed_ns: int
    queued_ns: int
    run_queue_ns: int


class GroupTimer:
    """Times one call to one or more members, from ``call()`` to the last answer."""

    __slots__ = (
        "_ledger",
        "_left",
        "_meter",
        "_run_queue_0",
        "_share_0",
        "_started",
        "caller_run_queue_ns",
        "method",
        "role",
        "share_ns",
        "slowest",
        "wall_ns",
    )  # fmt: skip

    def __init__(self, ledger: CallLedger, meter: RunQueueMeter, role: str, method: str, members: int) -> None:
        self.role, self.method = role, method
        self.slowest: MemberTime | None = None
        self.wall_ns = self.caller_run_queue_ns = 0
        self._ledger, self._meter, self._left = ledger, meter, members
        self.share_ns = 0.0
        self._run_queue_0 = meter.recent_ns()
        self._share_0 = ledger.shared_clock(+1)
        self._started = time.perf_counter_ns()

    def member_done(self, member: MemberTime | None) -> None:
        """On the runtime's loop; None for a member that gave no times because it failed without an answer."""
        if member is not None:
            spent = member.executed_ns + member.queued_ns
            if self.slowest is None or spent > self.slowest.executed_ns + self.slowest.queued_ns:
                self.slowest = member
        self._left -= 1
        if self._left == 0:
            self.wall_ns = time.perf_counter_ns() - self._started
            self.caller_run_queue_ns = self._meter.recent_ns() - self._run_queue_0
            self.share_ns = self._ledger.shared_clock(-1) - self._share_0
            self._ledger.add(self)

    def woke(self, lag_ns: int, run_queue_ns: int) -> None:
        self._ledger.add_wake(self.role, self.method, lag_ns, run_queue_ns)
