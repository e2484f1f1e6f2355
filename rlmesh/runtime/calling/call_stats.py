"""Statistics of ended calls: where the caller's time went, and the edges from this process in the job's call graph.

An ended call costs one tuple. The sums are made when they are taken, or when many tuples wait. The time that threads
were runnable without a core is no time of rlmesh; `RunQueueMeter` reads it from the kernel's counters.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rlmesh.runtime.process import forked

FOLD_AT = 4_000
"""Up to this number of calls between two reports, the time is shared out exactly. More calls are summed in bulk: the
exact way would cost a busy caller a third of its calls."""
RECENT_NS = 5_000_000
"""A look at the kernel's counters that is no older than this is used again."""


@dataclass(frozen=True, slots=True)
class CallStats:
    """The caller's time in the calls of one method of one role, summed over one report.

    ``overhead_s`` is the time in rlmesh itself: ``wall_s`` minus what the slowest member spent in the method
    and in methods queued before it, minus the time that threads of both sides were runnable without a core.
    ``share_s``: while n calls are pending at once, each is charged 1/n of that time; so the shares of all calls add up
    to the time in which any was pending. 0 if it was not measured.
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
        """The sum of both, for calls of the same method of the same member."""
        return EdgeStats(
            self.callee, self.method, self.calls + other.calls, self.failed + other.failed,
            self.wall_s + other.wall_s, self.method_s + other.method_s, self.queued_s + other.queued_s,
            self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes,
        )  # fmt: skip


class CallGroup:
    """The calls of one group call that have not ended; together they make one record."""

    __slots__ = ("left", "slowest")

    def __init__(self, members: int) -> None:
        self.left = members
        self.slowest: tuple[str, int, int, int] | None = None

    def member_done(self, times: tuple[str, int, int, int] | None) -> tuple[str, int, int, int] | None:
        """Count a member whose call has ended.

        Args:
            times: its name, and executed, queued and run-queue ns; None if it failed without an answer.

        Returns:
            The times of the slowest member, once the last one is done.
        """
        if times is not None and (self.slowest is None or times[1] + times[2] > self.slowest[1] + self.slowest[2]):
            self.slowest = times
        self.left -= 1
        return self.slowest if self.left == 0 else None


EndedCall: TypeAlias = tuple[str, str, int, int, int, bool, int, int, int, int, int, int, CallGroup | None]
"""An ended call to one member, as a plain tuple, since there is one for every call: member, method, call number, start
and end (ns of `time.perf_counter_ns`), True if it was answered, ns in the method, ns in the member's queue, bytes sent,
bytes received, ns that threads were runnable without a core at the caller (-1 for a notification, which no caller waits
for), the same at the member, and the group call that it is a part of."""


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    wall_ns: int = 0
    method_ns: int = 0
    queued_ns: int = 0
    run_queue_ns: int = 0
    overhead_ns: int = 0
    share_ns: float = 0.0
    slowest: Counter[str] = field(default_factory=Counter)

    def add(
        self, calls: int, wall_ns: int, method_ns: int, queued_ns: int, run_queue_ns: int, share_ns: float, name: str
    ) -> None:
        """Add calls whose slowest member was ``name``."""
        self.calls += calls
        self.wall_ns += wall_ns
        self.method_ns += method_ns
        self.queued_ns += queued_ns
        self.run_queue_ns += run_queue_ns
        self.overhead_ns += max(0, wall_ns - method_ns - queued_ns - run_queue_ns)
        self.share_ns += share_ns
        self.slowest[name] += calls


class CallRecorder:
    """The ended calls of one runtime. ``add`` and ``add_wake`` may be called from any thread.

    Attributes:
        trace: gets the single calls as well, some time after they ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[EndedCall] = []
        self._in_edges = 0
        """The number of ended calls that are in the sums of the edges, but not yet in the sums of the times."""
        self._edges: dict[tuple[str, str], tuple[int, ...]] = {}
        self._times: dict[tuple[str, str], _Sum] = {}
        self._wakes: list[tuple[str, str, int, int]] = []
        self.trace: Callable[[Sequence[EndedCall]], None] | None = None

    def add(self, call: EndedCall) -> None:
        self._ended.append(call)
        if len(self._ended) > FOLD_AT:
            self._fold(_add_in_bulk)

    def add_wake(self, role: str, method: str, lag_ns: int, run_queue_ns: int) -> None:
        """Add the time from the arrival of an answer until the thread that waited for it ran."""
        self._wakes.append((role, method, lag_ns, run_queue_ns))
        if len(self._wakes) > FOLD_AT:
            self._fold(_add_exactly)

    def take_edges(self) -> tuple[EdgeStats, ...]:
        """The calls since the last take, by member and method, without calls to rlmesh's own processes, whose names
        begin with ``@``."""
        with self._lock:
            fresh = self._sum_edges()
            sums, self._edges = self._edges, {}
        self._hand_on(fresh)
        return tuple(
            EdgeStats(callee, method, calls, failed, wall / 1e9, executed / 1e9, queued / 1e9, sent, received)
            for (callee, method), (calls, failed, wall, executed, queued, sent, received) in sums.items()
        )

    def take_stats(self) -> tuple[CallStats, ...]:
        """The times since the last take, by role and method; a call to a group counts once, as its slowest member."""
        self._fold(_add_exactly)
        with self._lock:
            sums, self._times = self._times, {}
        return tuple(_stats(role, method, total) for (role, method), total in sums.items() if total.calls)

    def _fold(self, add_up: Callable[[dict[tuple[str, str], _Sum], list[EndedCall]], None]) -> None:
        """Put all ended calls into all sums."""
        with self._lock:
            fresh = self._sum_edges()
            # Delete in place, and only the entries that were read: other threads append to the same list meanwhile.
            ended, self._in_edges = self._ended[: self._in_edges], 0
            del self._ended[: len(ended)]
            wakes, self._wakes = self._wakes, []
            add_up(self._times, waited_for(ended))
            for role, method, lag_ns, run_queue_ns in wakes:
                total = self._times.setdefault((role, method), _Sum())
                total.wall_ns += lag_ns
                total.run_queue_ns += run_queue_ns
                total.overhead_ns += max(0, lag_ns - run_queue_ns)
        self._hand_on(fresh)

    def _sum_edges(self) -> list[EndedCall]:
        """Under the lock: put the calls that ended since the last time into the sums of the edges."""
        fresh = self._ended[self._in_edges :]
        self._in_edges += len(fresh)
        for key, calls in _by_method(fresh).items():
            if key[0].startswith("@"):
                continue
            # Whole columns at once: a busy caller ends 100,000 calls a second.
            _, _, _, started, ended, answered, executed, queued, sent, received, *_ = zip(*calls, strict=True)
            times = (sum(ended) - sum(started), sum(executed), sum(queued))
            new = (len(calls), len(calls) - sum(answered), *times, sum(sent), sum(received))
            self._edges[key] = tuple(map(int.__add__, self._edges.get(key, (0,) * len(new)), new))
        return fresh

    def _hand_on(self, fresh: list[EndedCall]) -> None:
        if self.trace is not None and fresh:
            self.trace(fresh)


def _by_method(calls: Sequence[EndedCall]) -> dict[tuple[str, str], list[EndedCall]]:
    groups: dict[tuple[str, str], list[EndedCall]] = {}
    for call in calls:
        groups.setdefault(call[:2], []).append(call)
    return groups


def waited_for(calls: Sequence[EndedCall]) -> list[EndedCall]:
    """The answered calls that a caller waited for; of a group call the last one, with the times of the slowest
    member."""
    found = []
    for call in calls:
        group = call[12]
        if group is None:
            if call[5] and call[10] >= 0:
                found.append(call)
        elif (slowest := group.member_done((call[0], call[6], call[7], call[11]) if call[5] else None)) is not None:
            name, executed_ns, queued_ns, run_queue_ns = slowest
            found.append((
                name, call[1], call[2], call[3], call[4], True, executed_ns, queued_ns, call[8], call[9], call[10],
                run_queue_ns, None,
            ))  # fmt: skip
    return found


def _add_exactly(sums: dict[tuple[str, str], _Sum], calls: list[EndedCall]) -> None:
    for call, share_ns in zip(calls, shares_ns(calls), strict=True):
        name, method, _, started_ns, ended_ns, _, executed_ns, queued_ns, _, _, waited_ns, run_queue_ns, _ = call
        _sum_of(sums, name, method).add(
            1, ended_ns - started_ns, executed_ns, queued_ns, waited_ns + run_queue_ns, share_ns, name
        )


def _add_in_bulk(sums: dict[tuple[str, str], _Sum], calls: list[EndedCall]) -> None:
    """Add sums of whole columns.

    The time in which any call was pending is estimated as the span from first to last, or as the sum of the calls'
    times if that is less; each call gets a share in proportion to its time.
    """
    if not calls:
        return
    groups = _by_method(calls)
    columns = {key: tuple(zip(*group, strict=True)) for key, group in groups.items()}
    walls = {key: sum(column[4]) - sum(column[3]) for key, column in columns.items()}
    span_ns = max(call[4] for call in calls) - min(call[3] for call in calls)
    share = min(1.0, span_ns / max(1, sum(walls.values())))
    for (name, method), (*_, executed, queued, _, _, waited, run_queue, _) in columns.items():
        wall_ns = walls[name, method]
        _sum_of(sums, name, method).add(
            len(executed), wall_ns, sum(executed), sum(queued), sum(waited) + sum(run_queue), wall_ns * share, name
        )


def _sum_of(sums: dict[tuple[str, str], _Sum], name: str, method: str) -> _Sum:
    return sums.setdefault((name.partition(":")[0], method), _Sum())


def shares_ns(calls: Sequence[EndedCall]) -> list[float]:
    """Each call's share of the time in which any call was pending: while n are pending, each gets 1/n of it."""
    events = sorted(
        [(call[3], 1, number) for number, call in enumerate(calls)]
        + [(call[4], -1, number) for number, call in enumerate(calls)]
    )
    shares = [0.0] * len(calls)
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


class RunQueueMeter:
    """Reads for how many nanoseconds threads of this process were runnable without a core (``schedstat``, field 2).

    On a machine with fewer cores than busy processes the machine causes this delay, not rlmesh.
    """

    def __init__(self, thread_ids: Iterable[int] = ()) -> None:
        self._files: list[int] = []
        self.last_ns = self.read_at_ns = 0
        """The result of the last look at the kernel's counters, and its time."""
        for thread_id in thread_ids:
            self.add(thread_id)

    def add(self, thread_id: int) -> None:
        try:
            self._files.append(os.open(f"/proc/self/task/{thread_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass  # A kernel without scheduler statistics: the delay is attributed to rlmesh.

    def recent_ns(self, now_ns: int) -> int:
        """The value of `read_ns` at most five milliseconds before ``now_ns`` (of `time.perf_counter_ns`).

        Many short calls share one read of the kernel's counters.
        """
        if now_ns - self.read_at_ns > RECENT_NS:
            self.last_ns = self.read_ns()
            self.read_at_ns = now_ns
        return self.last_ns

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
    """A meter for each thread, opened at its first use."""

    def __init__(self) -> None:
        self.meter = RunQueueMeter([threading.get_native_id()])
        self.last_ns = self.meter.read_ns()


_own = _ThreadMeter()


def _after_fork() -> None:
    global _own
    _own = _ThreadMeter()  # the thread has another id now


forked.reset_in_children(_after_fork)


def own_run_queue_ns() -> int:
    """Nanoseconds that the calling thread was runnable without a core since its start."""
    meter, now_ns = _own.meter, time.perf_counter_ns()
    return meter.recent_ns(now_ns) if now_ns - meter.read_at_ns > RECENT_NS else meter.last_ns


def own_run_queue_since_last_ns(now_ns: int = 0) -> int:
    """The increase of `own_run_queue_ns` since this thread's last call of this function.

    Args:
        now_ns: the current `time.perf_counter_ns`, if the caller has it.
    """
    own = _own
    meter, now_ns = own.meter, now_ns or time.perf_counter_ns()
    now = meter.recent_ns(now_ns) if now_ns - meter.read_at_ns > RECENT_NS else meter.last_ns
    last, own.last_ns = own.last_ns, now
    return now - last


def thread_ids_named(prefix: str) -> list[int]:
    """The ids of this process's threads whose kernel name begins with ``prefix``, such as ZeroMQ's ``ZMQbg/IO/0``."""
    found = []
    for thread_id in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread_id}/comm") as file:
                if file.read().startswith(prefix):
                    found.append(int(thread_id))
        except OSError:
            continue
    return found
