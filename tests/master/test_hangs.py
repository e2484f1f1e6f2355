"""Members of real jobs that do not move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmesh.errors import JobFailed
from rlmesh.testing import LocalCluster
from tests.master import hanging_job


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("spin", "its process runs"),
        # tests/agent/test_stacks.py has members that cannot answer.
        pytest.param("gil", "its process runs", marks=pytest.mark.slow),
        pytest.param("stop", "its process is stopped", marks=pytest.mark.slow),
    ],
)
def test_a_member_that_hangs_is_replaced(how: str, state: str, tmp_path: Path) -> None:
    out = tmp_path / "answer.json"
    with LocalCluster(run_root=tmp_path):
        result = hanging_job.build(how, out, "member", 1.5).submit("hang")
    assert json.loads(out.read_text()) == ["done by incarnation 1"]
    (record,) = result.status.restarts
    message = record.failure.message
    assert message.startswith("WORKER:0 (pid ") and "hangs: in " in message and " for TRAINER:0" in message
    assert state in message and "waiting: TRAINER:0 in run()" in message
    assert "WORKER:0 is called by TRAINER:0" in record.failure.touched
    (stacks,) = result.run_dir.glob("stacks-*.txt")
    text = stacks.read_text()
    assert all(f"=== {name}:0 (pid " in text for name in ("WORKER", "IDLE", "TRAINER"))
    assert "hanging_job.py" in text.partition("=== TRAINER:0")[2]
    own = {part.partition(":")[0] for part in text.split("=== ") if "MainThread] (most recent call first)" in part}
    assert own >= {"IDLE", "TRAINER"}, "they answered, and got no signal"
    assert ("WORKER" in own) == (how == "spin")
    if how == "stop":
        assert "it did not answer with its stacks" in message
    else:
        assert "hanging_job.py:" in message and " in work" in message
    assert all(report.clean for report in result.exit_reports)


@pytest.mark.slow
def test_without_a_restart_the_job_ends_and_names_the_hang(tmp_path: Path) -> None:
    job = hanging_job.build("spin", tmp_path / "out", "never", 1.5)
    with LocalCluster(run_root=tmp_path), pytest.raises(JobFailed) as caught:
        job.submit("hang")
    (first,) = caught.value.exceptions
    assert "WORKER:0 (pid" in str(first) and "hangs" in str(first) and "is called by TRAINER:0" in str(first)


def test_who_is_slow_but_reports_does_not_hang(tmp_path: Path) -> None:
    out = tmp_path / "answer.json"
    with LocalCluster(run_root=tmp_path):
        result = hanging_job.build("slow", out, "never", 2.0).submit("slow")
    assert json.loads(out.read_text()) == ["done"]
    assert not result.status.restarts and not list(result.run_dir.glob("stacks-*"))
