"""The time that threads were runnable without a core, from the kernel's counters."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

from rlmesh.runtime.process import forked

RECENT_NS = 5_000_000
"""A look at the kernel's counters that is no older than this is used again."""


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
