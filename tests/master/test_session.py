"""What the launcher's process passes on to the master of its job."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rlmesh.driver import session as session_module
from rlmesh.driver.interrupt import Interrupt
from rlmesh.driver.session import Session
from rlmesh.job.status import JobStatus
from tests.own_time import HANG_S


class Snapshot:
    """An answer that is there at once, or ``comes`` while its caller waits for it."""

    def __init__(self, status: JobStatus, *, comes: bool) -> None:
        self.status, self._there = status, not comes

    def done(self) -> bool:
        there, self._there = self._there, True
        return there

    def result(self) -> JobStatus:
        return self.status

    def add_done_callback(self, fn: Any) -> None:
        pass


class Master:
    """Keeps what it is told; its second snapshot says that the job has ended."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.told: list[str] = []
        self._interrupt = interrupt

    def options(self, **_: object) -> Master:
        return self

    def call(self, what: str, *_: object) -> Any:
        self.told.append(what)
        if self.told == ["status"]:
            threading.Timer(0.1, self._interrupt.ask, ("SIGTERM",)).start()
            return Snapshot(JobStatus("j", "j-1", "running", 0.0, "/run"), comes=True)
        self._interrupt.wake()
        return Snapshot(JobStatus("j", "j-1", "stopped", 0.0, "/run"), comes=False)


def test_a_signal_that_comes_with_a_snapshot_is_passed_on_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the wake-up of the one wait, and must not be forgotten in the next."""
    monkeypatch.setattr(session_module, "POLL_S", HANG_S)  # Waits end when they are woken.
    interrupt = Interrupt()
    space: Any = SimpleNamespace(job_id="j-1", run_dir="/run", master_endpoint="unix:///")
    config: Any = SimpleNamespace(node_rank=0, submitted_at=0.0)
    session = Session("j", space, [config], interrupt, make_view=Mock(), first_answer_s=1.0, report=Mock())
    session._view, session._logs = Mock(), Mock()
    master: Any = Master(interrupt)
    try:
        session._follow(master)
    finally:
        session._watch.close()
        interrupt.close()
    assert master.told == ["status", "stop", "status", "goodbye"]
