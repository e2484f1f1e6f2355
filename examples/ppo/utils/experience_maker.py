"""Experience: episodes of the rollout engines, and their rewards."""

from collections.abc import Sequence

from rlmesh.rl import SamplingParams
from rlmesh.rl.rewards import Response
from rlmesh.rl.types import Episode

from .. import remote_call


class SamplesGenerator:
    """Samples and scores through other roles."""

    def generate_samples(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Episode]:
        """One episode per prompt."""
        return [Episode.of(sample) for sample in remote_call.vllm_generate(prompts, params)]

    def score(self, samples: Sequence[Response], ground_truths: Sequence[str]) -> list[float]:
        """One reward per response."""
        ended = [sample.finish_reason == "stop" for sample in samples]
        return list(remote_call.reward_forward([sample.text for sample in samples], ended, ground_truths))
