"""The time a test measures, less the time in which its processes waited for a core.

The kernel counts for every thread how long it waited on a run queue (``/proc/<pid>/task/<tid>/schedstat``).
:class:`OwnTime` subtracts the delay of the processes under test, and of no others, so that a bound on a duration reads
``elapsed - run-queue delay of these processes <= bound``. The processes under test are the test process, its children
and all processes that carry its session's mark.

Run as a program, the module samples these counters. The sampler is a process of its own, because a thread would wait
for the lock of the interpreter under test.

A moment counts as delay if one of the threads waits in it, however many do, and only for the share of the cores that
the processes under test do not use: a product that occupies all cores by itself delays itself, and gets nothing. A
thread that ends between two samples loses its last delay, which makes the bound stricter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

HANG_S = 40.0
"""Limit of a wait that only guards against a hang. It is no statement about how long something may take."""

SAMPLE_S = 0.02
ROW = struct.Struct("dddd")


class Look(NamedTuple):
    """What the counters of all threads tell about the time since the look before."""

    at: float
    """Time of the look, ``time.monotonic()``."""

    spent_s: float
    """Seconds since the look before."""

    waited_s: float
    """Delay of the thread that waited longest. The kernel adds a wait when it ends, so it may exceed ``spent_s``."""

    ran: float
    """Share of the machine's cores that the threads used, at most 1."""


class Delays:
    """The delay of each moment that some looks are about.

    Args:
        looks: in the order of their times. Each wait is taken to end at its look and to reach back from there.
    """

    def __init__(self, looks: Sequence[Look]) -> None:
        reach, steps = 0.0, list[float]()
        for look in reversed(looks):
            reach = max(reach, look.waited_s)
            waited = min(reach, look.spent_s)
            reach -= waited
            steps.append(waited * (1.0 - look.ran))
        self._times = [looks[0].at - looks[0].spent_s, *(look.at for look in looks)] if looks else [0.0]
        self._totals = list(accumulate(reversed(steps), initial=0.0))

    def between(self, began: float, ended: float) -> float:
        """Seconds of delay between two moments, at most ``ended - began``."""
        return self._until(ended) - self._until(began)

    def longest(self, span_s: float, began: float) -> float:
        """The greatest delay within ``span_s`` seconds that begin at ``began`` or later."""
        ends = (at for at in self._times if at > began)
        return max((self.between(max(began, at - span_s), at) for at in ends), default=0.0)

    def _until(self, moment: float) -> float:
        place = bisect_left(self._times, moment)
        if place in (0, len(self._times)):
            return self._totals[min(place, len(self._totals) - 1)]
        earlier, later = self._times[place - 1], self._times[place]
        before = self._totals[place - 1]
        return before + (self._totals[place] - before) * (moment - earlier) / (later - earlier)


class RunQueue:
    """Looks at the counters of processes."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._looked_at = time.monotonic()
        self._counters: dict[str, tuple[int, int]] = {}

    def look(self, pids: Iterable[int]) -> Look:
        """Read the counters of all threads of ``pids``; a thread counts from the second time that it is seen."""
        now = time.monotonic()
        spent_s = now - self._looked_at
        counters = {path: both for pid in pids for path, both in thread_counters(pid)}
        steps = [
            (ran - self._counters[path][0], waited - self._counters[path][1])
            for path, (ran, waited) in counters.items()
            if path in self._counters
        ]
        self._counters, self._looked_at = counters, now
        waited_s = max((waited for _, waited in steps), default=0) / 1e9
        ran_s = sum(ran for ran, _ in steps) / 1e9
        return Look(now, spent_s, waited_s, min(1.0, ran_s / (spent_s * self._cores)) if spent_s > 0 else 0.0)


def thread_counters(pid: int) -> list[tuple[str, tuple[int, int]]]:
    """Nanoseconds for which each thread of a process ran, and waited for a core; empty if the process is gone."""
    found = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for task in tasks:
        path = f"/proc/{pid}/task/{task}/schedstat"
        if text := read_file(path):
            ran, waited, _ = text.split()
            found.append((path, (int(ran), int(waited))))
    return found


class Family:
    """Finds the processes under test.

    Args:
        root: the test process.
        mark: ``NAME=value``, the environment variable that its processes inherit.
    """

    def __init__(self, root: int, mark: str) -> None:
        self._root = root
        self._mark = mark.encode()
        self._strangers: frozenset[int] = frozenset({os.getpid()}) - {root}
        self._members: frozenset[int] = frozenset({root})

    def pids(self) -> frozenset[int]:
        """The process IDs of all that run now."""
        there = frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
        members = self._members & there | {self._root}
        strangers = self._strangers & there
        for pid in sorted(there - members - strangers):
            if _parent(pid) in members or self._mark in read_file(f"/proc/{pid}/environ"):
                members |= {pid}
            else:
                strangers |= {pid}
        self._members, self._strangers = members, strangers
        return members


class Sampler:
    """The sampling process ``pid`` and the file of its samples, for one session of tests."""

    def __init__(self, folder: Path, mark: str) -> None:
        self._rows, self._wanted = folder / "rows", folder / "wanted"
        command = [sys.executable, "-I", "-S", __file__, str(folder), str(os.getpid()), mark]
        # The sampler is no process under test, so it does not inherit the mark.
        environment = {name: value for name, value in os.environ.items() if name != mark.partition("=")[0]}
        begun = subprocess.run(command, check=True, timeout=HANG_S, stdout=subprocess.PIPE, env=environment)
        self.pid = int(begun.stdout)

    def start(self) -> None:
        """Sample from now on."""
        self._rows.write_bytes(b"")
        self._wanted.touch()

    def stop(self) -> None:
        self._wanted.unlink()

    def looks_until(self, moment: float) -> list[Look]:
        """All samples, as soon as one is taken after ``moment``."""
        deadline = time.monotonic() + HANG_S
        while True:
            data = self._rows.read_bytes()
            looks = [Look(*row) for row in ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size])]
            if looks and looks[-1].at >= moment:
                return looks
            if time.monotonic() >= deadline:
                raise TimeoutError(f"process {self.pid} has sampled nothing for {HANG_S:g} s")
            time.sleep(SAMPLE_S / 2)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # The sampler is a child of a test process that is a subreaper.
            os.waitpid(self.pid, 0)


class OwnTime:
    """The time of the processes under test: real time, less the time in which they waited for a core."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._began = sampler, time.monotonic()
        sampler.looks_until(self._began)

    @property
    def waited_s(self) -> float:
        """Run-queue delay since this object was made, in seconds."""
        now = time.monotonic()
        return Delays(self._sampler.looks_until(now)).between(self._began, now)

    def since(self, began: float) -> float:
        """Seconds of own time since ``began``, a value of ``time.monotonic()`` within this test."""
        now = time.monotonic()
        return now - began - Delays(self._sampler.looks_until(now)).between(began, now)

    def holds_within(self, limit_s: float, condition: Callable[[], bool]) -> bool:
        """True once a condition holds; False if it does not hold after ``limit_s`` seconds of own time."""
        began = time.monotonic()
        while not condition():
            if self.since(began) >= limit_s:
                return condition()
            time.sleep(SAMPLE_S)
        return True

    def of(self, measured_s: float) -> float:
        """Seconds of own time in a duration that another process or thread measured, at some time since this object
        was made: ``measured_s`` less the greatest delay within any interval of that length."""
        looks = self._sampler.looks_until(time.monotonic())
        return measured_s - Delays(looks).longest(measured_s, self._began)


def read_file(path: str) -> bytes:
    """All that a file below /proc holds; nothing if it cannot be read."""
    # The plain calls take a quarter of a Path's time.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        part = text = os.read(file, 1 << 16)
        while len(part) == 1 << 16:
            text += (part := os.read(file, 1 << 16))
        return text
    except OSError:
        return b""
    finally:
        os.close(file)


def _parent(pid: int) -> int:
    _, _, rest = read_file(f"/proc/{pid}/stat").rpartition(b") ")
    return int(rest.split()[1]) if rest else 0


def main(folder: str, root: str, mark: str) -> None:
    """Write a row for each sample while the file ``wanted`` is there, until the process ``root`` is gone."""
    # The sampler must not be a child of the test process: some tests end what they find below them.
    if (pid := os.fork()) > 0:
        print(pid, flush=True)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with contextlib.suppress(PermissionError):  # Without the priority, samples come late on a busy machine.
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    rows, wanted = os.path.join(folder, "rows"), os.path.join(folder, "wanted")
    queue = RunQueue()
    while os.path.exists(f"/proc/{root}"):
        family = Family(int(root), mark)
        while os.path.exists(wanted):
            look = queue.look(family.pids())
            with open(rows, "ab") as file:
                file.write(ROW.pack(*look))
            time.sleep(SAMPLE_S)
        time.sleep(SAMPLE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
