"""A small training as a script: ``run_job.py MODEL``."""

from __future__ import annotations

import sys

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rewards import Score
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings

ROWS = [{"prompt": "abcd"[place % 4] * (1 + place % 3) + ">", "ground_truth": "a"} for place in range(32)]


def is_a(response: str) -> Score:
    return Score(response.replace(" ", "").count("a") / 4, metrics={"letters": float(len(response))})


if __name__ == "__main__":
    Run(
        model=sys.argv[1], data=ROWS, rewards=[is_a], algorithm=GRPO(samples=4), batch_size=8, steps=8, save_every=2,
        actor=ActorSettings(lr=1e-2), rollout=RolloutSettings(max_tokens=4),
    ).submit("trained")  # fmt: skip
