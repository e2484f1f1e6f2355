"""Experience: episodes of the rollout engines, and their rewards."""

from rlmesh.rl import SamplingParams
from rlmesh.rl.rewards import Reward
from rlmesh.rl.types import Episode

from .. import remote_call


class SamplesGenerator:
    """Samples and scores through other roles."""

    def __init__(self, reward: Reward) -> None:
        self.reward = Reward(remote_call.reward_forward, name=reward.name, inline=True)

    def generate_samples(self, prompts: list[list[int]], params: SamplingParams) -> list[Episode]:
        """One episode per prompt."""
        return [Episode.of(sample) for sample in remote_call.vllm_generate(prompts, params)]
