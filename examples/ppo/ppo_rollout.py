"""A rollout engine: samples responses with the weights of the last push."""

from collections.abc import Sequence

from rlmesh import rpc
from rlmesh.rl import Sample, SamplingParams
from rlmesh.rl.roles.rollout import RolloutRole

from . import remote_call


class VLLMActor(RolloutRole):
    """The engine that ``rollout.engine`` names: transformers, vllm or vllm-async."""

    @rpc(remote_call.vllm_generate)
    def vllm_generate(self, prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> list[Sample]:
        return self.generate(prompt_token_ids, params)
