"""Strangers at the sockets of a job are counted where people look: status, metrics, and the end of the log."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlmesh.agent.monitoring.rejections import AGAIN_TICKS, RejectionReporter, RejectionSums
from rlmesh.run_directory.discovery import running_jobs
from rlmesh.runtime.connections.handshake import LOG_EVERY_S, QUIET_S, Strangers
from tests.master.launched import ROOT, TOY, Launched
from tests.own_time import HANG_S

pytestmark = pytest.mark.case("a22")


def test_the_last_line_of_the_log_counts_all(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    strangers = Strangers("A:0", lambda: now)
    strangers.settle(at_the_end=True)
    assert caplog.messages == []
    for _ in range(5000):
        now += 0.001
        strangers.note("10.0.0.1", "no greeting", "bytes")
        strangers.settle()
    assert len(caplog.messages) == 1, "while they come, one line a minute"
    now += QUIET_S
    strangers.settle()
    strangers.settle()
    assert caplog.messages[1:] == ["A:0 rejected 5000 strangers in all: 5000 no greeting"]
    for _ in range(50):  # one that comes again and again does not fill the log
        strangers.note("10.0.0.1", "wrong key", "x")
        now += QUIET_S
        strangers.settle()
    assert len(caplog.messages) <= 2 + 2 * (50 * QUIET_S // LOG_EVERY_S + 1)
    strangers.settle(at_the_end=True)
    assert caplog.messages[-1].endswith("5000 no greeting, 50 wrong key")


def test_a_single_stranger_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    strangers = Strangers("A:0", lambda: now)
    strangers.note("10.0.0.1", "no greeting", "bytes")
    now += 1000
    strangers.settle()
    strangers.settle(at_the_end=True)
    assert len(caplog.messages) == 1


def test_counts_are_told_when_they_change_and_now_and_then() -> None:
    counts: Counter[str] = Counter()
    told: list[Any] = []
    runtime: Any = SimpleNamespace(strangers=SimpleNamespace(counts=counts))
    reporter = RejectionReporter(runtime, lambda pid, counts: told.append((pid, dict(counts))))
    reporter.flush()
    assert told == []
    counts["wrong key"] += 3
    reporter.flush()
    reporter.flush()
    assert told == [(os.getpid(), {"wrong key": 3})]
    for _ in range(AGAIN_TICKS):
        reporter.flush()
    assert len(told) == 2, "another master has it, too"


def test_incarnations_add_up_and_repetitions_do_not() -> None:
    sums = RejectionSums()
    assert str(sums) == ""
    sums.take("A:0", 11, {"no greeting": 3})
    sums.take("A:0", 11, {"no greeting": 5, "wrong key": 1})
    sums.take("A:0", 12, {"no greeting": 2})
    sums.take("agent:0", 9, {"half-open": 1})
    assert sums.by_process() == {"A:0": {"no greeting": 7, "wrong key": 1}, "agent:0": {"half-open": 1}}
    assert str(sums) == "9 rejected (7 no greeting, 1 wrong key, 1 half-open), at A:0 8, agent:0 1"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launched]:
    command = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--metrics", "127.0.0.1:0", str(TOY)]
    with Launched([*command, "--", "--sleep", "120"], tmp_path) as launched:
        launched.wait_for("step 1")
        yield launched


def sockets_of(run: Path) -> list[Path]:
    (found,) = [job for job in running_jobs() if Path(job.run_dir).resolve() == run.resolve()]
    return [path for path in Path(found.folder).rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]


def flood(path: Path, times: int) -> None:
    for _ in range(times):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(HANG_S)
            stranger.connect(str(path))
            try:
                stranger.sendall(
                    b"GET / HTTP/1.1\r\nHost: nobody here speaks this protocol at all, I am afraid\r\n\r\n"
                )
                while stranger.recv(4096):
                    pass
            except OSError:
                pass  # it was thrown out


def rejected(where: str) -> dict[str, int]:
    with urllib.request.urlopen(where, timeout=HANG_S) as answer:
        text = answer.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {s.labels["process"]: int(s.value) for s in samples if s.name == "rlmesh_rejected_total"}


def test_a_flood_is_seen_in_status_and_metrics_and_logs(job: Launched, tmp_path: Path) -> None:
    (run,) = (tmp_path / "runs").iterdir()
    where = (run / "metrics.address").read_text().strip()
    sockets = sockets_of(run)
    for path in sockets:
        flood(path, 40)
    wanted = {"ADDER:0": 40, "ADDER:1": 40, "TRAINER:0": 40, "agent:0": 40, "master": 40}
    deadline = time.monotonic() + HANG_S
    while (seen := rejected(where)) != wanted:
        assert time.monotonic() < deadline, (seen, sockets)
        time.sleep(0.2)
    status = subprocess.run(
        [sys.executable, "-m", "rlmesh.cli.main", "status", str(run)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}, timeout=HANG_S, check=True,
    ).stdout  # fmt: skip
    assert "strangers: 200 rejected (200 no greeting), at " in status, status
    os.kill(job.process.pid, signal.SIGINT)
    assert job.ended() == 130
    for name in ("ADDER-0", "ADDER-1", "TRAINER-0", "agent-0", "master"):
        (path,) = (run / "logs").glob(f"{name}.log")
        told = [line for line in path.read_text().splitlines() if "reject" in line]
        assert told and "40 strangers in all: 40 no greeting" in told[-1], (name, told)
