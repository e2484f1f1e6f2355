"""The PPO example as a user runs it: real processes, and it learns."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.ppo_runs import SMALL, check_run_directory, ends_of, launch, sets


@pytest.mark.slow
def test_two_steps_of_a_small_batch_from_start_to_end(tiny: Path, tmp_path: Path) -> None:
    output, run_dir, curve = launch(tmp_path, "--pretrain", str(tiny), "--steps", "2", *SMALL, timeout=110)
    check_run_directory(run_dir, curve, 2)
    for name in ("reward_mean", "val/reward_mean", "kl", "steps_lost", "log_prob_gap", "step_time_s"):
        assert f"{name} " in output, "the view shows what matters most"
    assert [metrics["reward/exact_match/failed"] for metrics in curve[1:]] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_reward_and_heldout_accuracy_rise(seed: int, tmp_path: Path) -> None:
    """With the folder of model and data that the command makes by default."""
    _, run_dir, curve = launch(tmp_path, "--job_name", "learns", "--seed", str(seed), timeout=540)
    assert (tmp_path / "runs" / f"tiny-{seed}" / "train.jsonl").exists()
    ends = ends_of(curve)
    assert ends["reward_first"] <= 0.6 and ends["heldout_first"] <= 0.6, ends
    assert ends["reward_last"] >= 0.9 and ends["heldout_last"] >= 0.9, ends
    check_run_directory(run_dir, curve, 150)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'rlmesh[deepspeed]'"
)
def test_reward_rises_with_deepspeed(tiny: Path, tmp_path: Path) -> None:
    options = ["--pretrain", str(tiny), "--steps", "30", *sets("train=zero3", "actor.activation_checkpointing=true")]
    _, run_dir, curve = launch(tmp_path, *options, timeout=540)
    ends = ends_of(curve)
    assert ends["reward_last"] >= ends["reward_first"] + 0.15, ends
    check_run_directory(run_dir, curve, 30)
