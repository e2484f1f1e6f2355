"""The logic of the trainer. Its loop is `fit` and `step` of the class that it inherits from, and meant to be read."""

from rlmesh.rl import SamplingParams
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.rl.types import Episode

from .utils.experience_maker import SamplesGenerator


class PPOTrainer(Trainer):
    """Trains by PPO, and leaves samples and scores to a `SamplesGenerator`."""

    def setup(self) -> None:
        super().setup()
        self.generator = SamplesGenerator(*self.settings.scored)
        self.rewards = self.validation_rewards = Rewards([self.generator.reward], self.tokenizer)

    def draw(self, prompts: list[list[int]], params: SamplingParams) -> list[Episode]:
        return self.generator.generate_samples(prompts, params)
