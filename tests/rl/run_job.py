"""A small training as a script: ``run_job.py MODEL grpo|ppo PLACEMENT GPUS``."""

from __future__ import annotations

import sys
from typing import Any

from rlmesh.rl.algorithms import GRPO, PPO
from rlmesh.rl.rewards import Score
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings

ROWS = [{"prompt": "abcd"[place % 4] * (1 + place % 3) + ">", "ground_truth": "a"} for place in range(32)]
ALGORITHMS = {"grpo": GRPO(samples=4), "ppo": PPO(samples=4, kl=0.01)}


def is_a(response: str) -> Score:
    return Score(response.replace(" ", "").count("a") / 4, metrics={"letters": float(len(response))})


def make(model: str, algorithm: str, placement: Any, devices: int = 0) -> Run:
    return Run(
        model=model, data=ROWS, rewards=[is_a], algorithm=ALGORITHMS[algorithm], batch_size=8, steps=8, save_every=2,
        actor=ActorSettings(lr=1e-2), critic=CriticSettings(lr=1e-2), rollout=RolloutSettings(max_tokens=4),
        placement=placement, devices_per_node=devices,
    )  # fmt: skip


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2], sys.argv[3], devices=int(sys.argv[4])).submit("trained")
