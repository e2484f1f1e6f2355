"""Behaviour cloning of a model's own good responses (rejection sampling): it learns to say the letter a.

python examples/trainings/tiny_model.py tiny && python examples/trainings/behaviour_cloning.py tiny
"""

import sys

from rlmesh.rl.algorithms import BehaviourCloning
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings

ROWS = [{"prompt": f"{a}{b}>"} for a in "abcdefgh" for b in "abcdefgh"]


def share_of_a(response: str) -> float:
    return response.count("a") / 4


def training(model: str) -> Run:
    return Run(
        model=model, data=ROWS, rewards=[share_of_a], algorithm=BehaviourCloning(samples=4, at_least=0.25), steps=25,
        batch_size=16, actor=ActorSettings(lr=1e-2), rollout=RolloutSettings(max_tokens=4), save_every=1000,
    )  # fmt: skip


if __name__ == "__main__":
    print("mean reward:", training(sys.argv[1]).submit("cloning").metrics["reward_mean"])
