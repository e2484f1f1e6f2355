"""The logic of the trainer. Its loop is `fit` and `step` of the class that it inherits from, and meant to be read."""

from collections.abc import Sequence

from rlmesh.rl import SamplingParams
from rlmesh.rl.rewards import Reward
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.rl.types import Episode

from .utils.experience_maker import SamplesGenerator


class PPOTrainer(Trainer):
    """Trains by PPO, and leaves samples and scores to a `SamplesGenerator`."""

    def setup(self) -> None:
        super().setup()
        self.generator = SamplesGenerator()
        reward = Reward(self.generator.score, name="exact_match", inline=True)
        self.rewards = self.validation_rewards = Rewards([reward], self.tokenizer)

    def draw(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Episode]:
        return self.generator.generate_samples(prompts, params)
