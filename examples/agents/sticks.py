"""A policy learns a text game: two players take 1 to 3 sticks in turn, and the one who takes the last wins. No GPU.

python tiny.py sticks small     # makes a model, its tokenizer and its data in the folder "small"
python sticks.py small
"""

import random
import sys

from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.rollout.episodes import EpisodeSettings, TurnResult, episode_return
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings


class Sticks:
    """The other player takes sticks at random."""

    def reset(self, row):
        self.left, self.other = row["sticks"], random.Random(row["seed"])

    def step(self, action):
        if action not in {"1", "2", "3"} or int(action) > self.left:
            return TurnResult(done=True)
        self.left -= int(action)
        if not self.left:
            return TurnResult(reward=1.0, done=True)
        self.left -= self.other.randint(1, min(3, self.left))
        return TurnResult(str(self.left), done=not self.left)


def make(folder, words=()):
    return Run.from_args(
        words, model=folder, data=f"{folder}/train.jsonl", rewards=[episode_return], algorithm=GRPO(samples=8),
        steps=25, batch_size=16, environment=Sticks, episode=EpisodeSettings(max_turns=10, max_tokens=40),
        actor=ActorSettings(lr=1e-3), rollout=RolloutSettings(max_tokens=3),
    )  # fmt: skip


if __name__ == "__main__":
    folder, *words = sys.argv[1:] or ["small"]
    print("games won:", make(folder, words).submit("sticks").metrics["reward_mean"])
