"""The PPO example as a user runs it: real processes, and it learns."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.ppo_runs import check_run_directory, launch


def test_two_steps_of_a_small_batch_from_start_to_end(tmp_path: Path) -> None:
    options = ["--steps", "2", "--batch_size", "33", "--warmup_accuracy", "0", "--micro_batch_size", "10"]
    output, run_dir, summary = launch(tmp_path, "--job_name", "small", *options, timeout=110)
    assert json.dumps(summary) in output
    check_run_directory(run_dir, summary)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_reward_and_heldout_accuracy_rise(seed: int, tmp_path: Path) -> None:
    output, run_dir, summary = launch(tmp_path, "--job_name", "learns", "--seed", str(seed), timeout=540)
    assert json.dumps(summary) in output
    assert summary["seed"] == seed
    assert summary["reward_first"] <= 0.6 and summary["heldout_first"] <= 0.6, summary
    assert summary["reward_last"] >= 0.9 and summary["heldout_last"] >= 0.9, summary
    check_run_directory(run_dir, summary)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'rlmesh[deepspeed]'"
)
def test_reward_rises_with_an_actor_of_deepspeed(tmp_path: Path) -> None:
    options = ["--actor_engine", "zero3", "--activation_checkpointing", "--steps", "30"]
    _, run_dir, summary = launch(tmp_path, "--job_name", "deepspeed", *options, timeout=540)
    assert summary["reward_last"] >= summary["reward_first"] + 0.15, summary
    check_run_directory(run_dir, summary)
