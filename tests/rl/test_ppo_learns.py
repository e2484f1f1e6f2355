"""PPO learns, and so does its critic: bounds that values of 0, or of a constant, would miss."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlmesh.rl.algorithms import PPO
from rlmesh.rl.rewards import Score
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings
from tests.rl import run_job
from tests.rl.test_run import reported

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def spelled(response: str, ground_truth: str) -> Score:
    letters = response.replace(" ", "")
    right = sum(a == b for a, b in zip(letters, ground_truth, strict=False))
    return Score(right / max(len(letters), len(ground_truth)), metrics={"right": float(letters == ground_truth)})


def test_values_explain_returns_that_the_tokens_so_far_determine(tiny: Path, tmp_path: Path) -> None:
    """The reward counts a letter, so a value must depend on the response so far."""
    run = replace(
        run_job.make(str(tiny), "ppo", "auto"),
        algorithm=PPO(samples=4), batch_size=16, steps=60, save_every=60,
        actor=ActorSettings(lr=1e-3), critic=CriticSettings(lr=5e-3, epochs=2),
    )  # fmt: skip
    steps = reported(run.here(run_dir=tmp_path / "run").run_dir)
    rewards = [steps[step]["reward_mean"] for step in range(1, 61)]
    explained = [steps[step]["critic/explained_variance"] for step in range(21, 61)]
    print([round(reward, 2) for reward in rewards], [round(share, 2) for share in explained])
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.4  # 0.09 → 0.8
    assert steps[1]["critic/explained_variance"] == 0, "a new critic knows nothing"
    # Between 0.12 and 0.27 at every sixth step; 0 of a constant.
    assert np.mean(explained) > 0.1
    assert abs(steps[60]["critic/value_mean"] - steps[60]["critic/return_mean"]) < 0.1


def test_ppo_learns_to_spell(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    subprocess.run(
        [sys.executable, EXAMPLES / "grpo_model.py", folder], check=True, timeout=400, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    run = Run(
        model=str(folder), data=f"{folder}/train.jsonl", validation=f"{folder}/validation.jsonl", rewards=[spelled],
        algorithm=PPO(samples=4), steps=80, batch_size=64, save_every=80,
        actor=ActorSettings(lr=5e-4, warmup_steps=5, epochs=2),
        critic=CriticSettings(lr=1e-3, warmup_steps=5, epochs=2),
        rollout=RolloutSettings(max_tokens=6),
    )  # fmt: skip
    result = run.here(run_dir=tmp_path / "run")
    steps = reported(result.run_dir)
    rewards = [steps[step]["reward_mean"] for step in range(1, 81)]
    print([round(reward, 2) for reward in rewards], result.metrics["val/reward/spelled/right"])
    # Seen: 0.50 before the first step, 0.73 after the last one.
    assert result.metrics["val/reward/spelled/right"] > 0.62
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5]) + 0.05
    # Values of 0 would leave an error above 0.4, which is that of the first step, and grows with the rewards.
    assert steps[80]["critic/squared_error"] < 0.06 < 0.3 < steps[1]["critic/squared_error"]
