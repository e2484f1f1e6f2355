"""A training under Slurm that is requeued goes on by itself."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.own_time import HANG_S
from tests.rl.checkpoints import run_script
from tests.rl.checkpoints.runs import content, make, make_model, metrics_of
from tests.slurm.cluster import SlurmCluster
from tests.slurm.nodes import output, wait_for

STEPS = 24


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_training_that_is_requeued_goes_on_with_the_next_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_model(tmp_path / "model")
    words = ("--nodes=1", "--output=out", "--requeue", run_script.__file__, "--", str(model), "ppo")
    said = slurm.run(
        sys.executable, "-m", "rlmesh.cli.main", "launch", "--slurm", *words, "--set", f"steps={STEPS}", cwd=tmp_path
    )
    job = re.findall(r"Slurm job (\d+)\n", said)[0]
    until = time.monotonic() + HANG_S * 3
    while not (found := [*tmp_path.glob("runs/*/metrics.jsonl")]) or max(metrics_of(found[0].parent), default=0) < 3:
        assert time.monotonic() < until, output(tmp_path)
        time.sleep(0.05)
    run_dir = found[0].parent
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    step = int(wait_for(tmp_path, r"stopped after step (\d+), all ranks at the same")[0])
    assert 3 <= step < STEPS
    slurm.wait_job(job, "PENDING", "RUNNING")
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
    assert slurm.wait_job(job, "COMPLETED", "FAILED", timeout_s=HANG_S * 3) == "COMPLETED", output(tmp_path)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["metrics"]["steps_lost"]) == (STEPS, 0)
    make(model, "ppo", steps=STEPS).here(run_dir=tmp_path / "whole")
    assert content(run_dir) == content(tmp_path / "whole")
