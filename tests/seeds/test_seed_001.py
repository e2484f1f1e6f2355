"""Document 001, reinforcement-learning design: its code block builds and runs on three nodes of two devices."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLConfig
from rlmesh.testing import LocalCluster
from tests.seeds import roles_001

JOB = Path(__file__).with_name("job_001.py")
ROLES = roles_001.__name__


def test_the_block_describes_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []
    monkeypatch.setattr(DLConfig, "submit", lambda *args: submitted.append(args))
    job = runpy.run_path(str(JOB))["rl_job"]
    assert submitted == [(job, "test")]
    assert (job.node_number, job.device_per_node) == (3, 2)
    assert job.user_config == {"c1": "v1"}
    assert {name: (w.backend, w.entry_point, w.total, w.per_node) for name, w in job.workloads.items()} == {
        "TRAINER": ("simple", f"{ROLES}.TestInteractiveTrainer", 1, None),
        "ACTOR": ("elastic", f"{ROLES}.TestActor", 2, 1),
        "ROLLOUT": ("simple", f"{ROLES}.TestRollout", 2, 1),
        "REFERENCE": ("simple", f"{ROLES}.TestReference", 2, 1),
    }
    assert job.envs_of("ACTOR") == {"e0": "v0", "e1": "v1"}
    assert job.envs_of("ROLLOUT") == {"e0": "v0"}
    asked = {name: workload.resource.accelerator for name, workload in job.workloads.items()}
    assert asked == {"TRAINER": 0, "ACTOR": 1, "ROLLOUT": 1, "REFERENCE": 1}


def test_the_block_runs(tmp_path: Path) -> None:
    """The trainer's own checks fail the job, and with it the submit, if anything is wrong."""
    with LocalCluster(nodes=3, devices_per_node=2, run_root=tmp_path):
        runpy.run_path(str(JOB))
    (run_dir,) = tmp_path.iterdir()
    logs = {path.stem for path in (run_dir / "logs").glob("[A-Z]*.log")}
    assert logs == {f"{role}-{rank}" for role in ("ACTOR", "ROLLOUT", "REFERENCE") for rank in (0, 1)} | {"TRAINER-0"}
    (record,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert "reward_mean" in json.dumps(record)
