"""A reward model from pairs: words in the order of the alphabet are preferred to words in the other order.

python examples/trainings/tiny_model.py tiny && python examples/trainings/reward_model.py tiny
"""

import sys

from dpo import ROWS

from rlmesh.rl.algorithms import RewardModelling
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings


def training(model: str) -> Run:
    return Run(
        model=model, data=ROWS[::2] + ROWS[1::4], validation=ROWS[3::4], algorithm=RewardModelling(), steps=80,
        batch_size=16, actor=ActorSettings(lr=5e-3), save_every=1000,
    )  # fmt: skip


if __name__ == "__main__":
    result = training(sys.argv[1]).submit("reward-model")
    print(
        f"right on held-out pairs: {result.metrics['val/accuracy']}; now: rewards=[RewardModel({str(result.model)!r})]"
    )
