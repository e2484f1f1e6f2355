"""Trainings whose members are killed, and one whose prompt kills engines: the ledger stays right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmesh.rl.rollout.ledger import LEDGER, faults_of, read_rows
from rlmesh.testing import LocalCluster
from tests.rl.conftest import make_tiny
from tests.rl.rollout import kills, kills_job, restart_job

WAIT_S = 180.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "engines"), [("sync", 1), ("async(staleness=2)", 2)])
def test_kills_lose_and_repeat_nothing(model: Path, tmp_path: Path, pipeline: str, engines: int) -> None:
    found = kills.attempt(tmp_path, model, pipeline, engines, kills=10, seed=1, steps=30)
    assert found.wrong == [], found.output
    assert sum(found.killed.values()) == 10 and found.void > 0


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["async(staleness=2)", "one-step-off"])
def test_a_push_that_an_engine_does_not_survive_stalls_nobody(model: Path, tmp_path: Path, pipeline: str) -> None:
    """The dead engine is not back before five more steps, which the other one samples for."""
    with LocalCluster(run_root=tmp_path):
        result = restart_job.build(model, pipeline).submit("restart", view="none")
    run_dir = Path(result.run_dir)
    assert faults_of(run_dir / LEDGER) == []
    rows = list(read_rows(run_dir / LEDGER))
    assert [row.step for row in rows if row.state == "trained"] == [
        step + 1 for step in range(restart_job.STEPS) for _ in range(kills_job.BATCH)
    ]
    served = [int(line) for line in (run_dir / restart_job.SERVED).read_text().split()]
    assert min(served) >= restart_job.BACK_AFTER, "it has the latest weights, and none of before its death"
    reports = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [report for report in reports if "drift_alarm" in report]
    assert len(found) == restart_job.STEPS
    assert all(report["drift_alarm"] == 0 for report in found), "each token is of the version that it names"
    assert sum(report["steps_lost"] for report in found) == 0


@pytest.mark.slow
def test_the_run_goes_on_without_a_prompt_that_kills_engines(model: Path, tmp_path: Path) -> None:
    with kills.training(tmp_path, model, "async(staleness=2)", 2, 6, poison=5) as process:
        assert process.wait(WAIT_S) == 0, (tmp_path / "output").read_text()
    assert faults_of(tmp_path / "run" / LEDGER) == []
    rows = {row.position: row for row in read_rows(tmp_path / "run" / LEDGER)}
    assert rows[5].state == "failed" and rows[5].reason.startswith("poison") and rows[5].deaths == 2
    assert {row.position for row in rows.values() if row.state != "trained"} == {5}
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("position 5" in json.dumps(event) for event in events), "an alarm tells people"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_two_hundred_kills_lose_and_repeat_nothing(model: Path, tmp_path: Path, number: int) -> None:
    pipeline, engines = kills.WAYS[number % len(kills.WAYS)]
    found = kills.attempt(tmp_path, model, pipeline, engines, kills=10, seed=100 + number, steps=40)
    assert found.wrong == [], found.output
