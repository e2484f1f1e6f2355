"""The command that brings another machine: run once for each lost node, and ended with all that it started."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlmesh.driver.relaunch import RELAUNCH_LOG, Relaunch
from tests.master.launched import alive
from tests.own_time import HANG_S, OwnTime


def lines(folder: Path, count: int) -> list[str]:
    """What the commands wrote, once there is so much."""
    log, deadline = folder / RELAUNCH_LOG, time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if log.exists() and len(found := log.read_text().split()) >= count:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not {count} words within {HANG_S:g} s: {log.read_text() if log.exists() else 'no log'}")


def test_a_machine_is_asked_for_once_for_each_loss(tmp_path: Path) -> None:
    asked = Relaunch("sh -c 'echo $RLMESH_NODE_RANK-$RLMESH_LOST_NODE-$JOB'", tmp_path, {"JOB": "j"})
    for _ in range(3):
        asked.look({2}, {2: "b"})
    assert lines(tmp_path, 1) == ["2-b-j"]
    asked.look(set(), {})
    asked.look({1, 2}, {2: "b"})
    assert sorted(lines(tmp_path, 3)) == ["1-1-j", "2-b-j", "2-b-j"]
    asked.close()


@pytest.mark.parametrize("first", ["", "trap : TERM;"], ids=["takes SIGTERM", "does not"])
def test_what_the_command_started_ends_with_it(first: str, tmp_path: Path, own_time: OwnTime) -> None:
    asked = Relaunch(f"sh -c '{first} sleep 1000 & echo $$ $!; while :; do wait; done'", tmp_path, {})
    asked.look({1}, {})
    pids = [int(pid) for pid in lines(tmp_path, 2)]
    assert all(map(alive, pids))
    asked.close()
    assert own_time.holds_within(2.0, lambda: not any(map(alive, pids)))


def test_a_command_that_cannot_be_run_or_fails_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Relaunch("/no/such/command", tmp_path, {}).look({1}, {})
    assert "/no/such/command" in caplog.text and "No such file" in caplog.text
    asked, deadline = Relaunch("false", tmp_path, {}), time.monotonic() + HANG_S
    while "ended with code 1; see " not in caplog.text and time.monotonic() < deadline:
        asked.look({3}, {3: "c"})
        time.sleep(0.01)
    assert "for node 3 ended with code 1; see " in caplog.text
