"""The watch for stalls of the machine sees one."""

from __future__ import annotations

import os
import signal
import time

from tests.stalls import Stalls, Watch


def test_a_stall_is_counted(stall_watch: Watch) -> None:
    stalls = Stalls(stall_watch)
    os.kill(stall_watch.pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(stall_watch.pid, signal.SIGCONT)
    deadline = time.monotonic() + 10.0
    while stalls.seconds < 0.25 and time.monotonic() < deadline:
        pass
    assert stalls.seconds >= 0.25
