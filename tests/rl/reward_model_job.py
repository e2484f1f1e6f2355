"""A small training with a reward model as a script: ``reward_model_job.py MODEL REWARD_MODEL PLACEMENT``."""

from __future__ import annotations

import sys
from typing import Any

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rewards import RewardModel
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from tests.rl.run_job import ROWS, is_a

if __name__ == "__main__":
    placement: Any = sys.argv[3]
    Run(
        model=sys.argv[1], data=ROWS, rewards=[RewardModel(sys.argv[2], members=2, timeout_s=60), is_a],
        algorithm=GRPO(samples=4), batch_size=8, steps=5, save_every=2, validation=ROWS[:6], placement=placement,
        actor=ActorSettings(lr=1e-2), rollout=RolloutSettings(max_tokens=4),
    ).submit("trained")  # fmt: skip
