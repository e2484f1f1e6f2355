"""How long this machine stood still or was short of something: what a shared machine takes from a test is not the
product's doing.

Run as a program it watches: one thread per core that only sleeps. What it oversleeps by more than a scheduler's usual
lateness, any thread on that core may have lost. It is a process of its own, since waiting for the lock of the
interpreter under test is no stall.

A sleeper is woken early where many threads want to run, needs no memory and reads no file. Those that work may wait
longer; the kernel's pressure stall information tells for how long somebody did.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

TICK_S = 0.01
USUAL_LATENESS_S = 0.02
HANG_S = 40.0
"""Whoever waits for longer hangs, however busy the machine is. How long things may take is for the tests to say."""
COUNTER = struct.Struct("d")
PRESSURE = Path("/proc/pressure")
_TOTAL = re.compile(r"some .*total=(\d+)")


class Watch:
    """The watching process ``pid``, and the seconds that it counted for each core."""

    def __init__(self, counters: Path) -> None:
        cores = sorted(os.sched_getaffinity(0))
        counters.write_bytes(bytes(COUNTER.size * len(cores)))
        with counters.open("rb") as file:
            self._counted = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        command = [sys.executable, "-I", __file__, str(counters), str(os.getpid()), *map(str, cores)]
        self.pid = int(subprocess.run(command, check=True, timeout=30, stdout=subprocess.PIPE).stdout)

    def total_s(self) -> float:
        """Seconds that the cores stood still since the watch began, all of them added up, and those in which something
        was scarce."""
        return sum(memoryview(self._counted[:]).cast("d")) + scarcity_s()

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._counted.close()


class Stalls:
    """What was lost since this object was made."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._before_s = watch, watch.total_s()

    @property
    def seconds(self) -> float:
        # A stall that ends just now is told of one tick later.
        time.sleep(2 * TICK_S)
        return self._watch.total_s() - self._before_s


def scarcity_s() -> float:
    """Seconds since the machine's start in which some thread waited for a core, for memory or for a disk (``some`` of
    ``/proc/pressure``, the mean of the cores); 0 where the kernel does not tell."""
    waited_us = 0
    for what in ("cpu", "memory", "io"):
        try:
            found = _TOTAL.match((PRESSURE / what).read_text())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
                raise
            continue
        waited_us += int(found[1]) if found else 0
    return waited_us / 1e6


def watch_core(counters: memoryview, place: int, core: int) -> None:
    os.sched_setaffinity(0, {core})  # of this thread alone
    lost_s = 0.0
    while True:
        began = time.monotonic()
        time.sleep(TICK_S)
        late_s = time.monotonic() - began - TICK_S
        if late_s > USUAL_LATENESS_S:
            lost_s += late_s
            COUNTER.pack_into(counters, place * COUNTER.size, lost_s)


def main(path: str, watched_for: str, *cores: str) -> None:
    # Not a child of the tests, some of which end what they find below them.
    if (pid := os.fork()) > 0:
        print(pid, flush=True)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with open(path, "r+b") as file:
        counters = memoryview(mmap.mmap(file.fileno(), 0))
    for place, core in enumerate(cores):
        threading.Thread(target=watch_core, args=(counters, place, int(core)), daemon=True).start()
    while os.path.exists(f"/proc/{watched_for}"):
        time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
