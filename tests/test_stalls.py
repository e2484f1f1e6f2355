"""The watch for stalls of the machine sees one, and that there are too few cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.stalls import PRESSURE, Stalls, Watch, scarcity_s


def test_a_stall_is_counted(stall_watch: Watch) -> None:
    stalls = Stalls(stall_watch)
    os.kill(stall_watch.pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(stall_watch.pid, signal.SIGCONT)
    deadline = time.monotonic() + 10.0
    while stalls.seconds < 0.25 and time.monotonic() < deadline:
        pass
    assert stalls.seconds >= 0.25


@pytest.mark.skipif(not (PRESSURE / "cpu").exists(), reason="this kernel has no pressure stall information")
def test_waiting_for_a_core_is_counted(stall_watch: Watch) -> None:
    """Three times as many as there are cores want to run for a quarter of a second each."""
    busy = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass"
    stalls, before_s, began = Stalls(stall_watch), scarcity_s(), time.monotonic()
    count = 3 * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", busy]) for _ in range(count)]
    try:
        assert [process.wait(60.0) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
            process.wait()
    took_s = time.monotonic() - began
    assert took_s / 4 < scarcity_s() - before_s <= stalls.seconds
