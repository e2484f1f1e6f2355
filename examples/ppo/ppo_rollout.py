"""A rollout engine: samples responses with the weights that it was pushed last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen2ForCausalLM

from rlmesh import ModuleSink, ReceivesWeights, RestartEvent, current_worker, rpc

from . import remote_call
from .common import Sample, SamplingParams, pretrained
from .model import sample


class RolloutActor(ReceivesWeights):
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.rank = current_worker().rank
        self.model: Qwen2ForCausalLM | None = None

    def on_restart(self, event: RestartEvent) -> None:
        """A process that takes another's place refuses to sample until it is pushed the weights."""
        self.init(str(pretrained()))

    @rpc(remote_call.rollout_init)
    def init(self, model_path: str) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(model_path).eval()
        self.receive_weights(ModuleSink(self.model))

    @rpc(remote_call.rollout_generate)
    def generate(self, prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> list[Sample]:
        own = SamplingParams(params.max_tokens, params.temperature, params.seed * 1009 + self.rank)
        with self.weights.serving() as version:
            assert self.model is not None
            drawn = sample(self.model, prompt_token_ids, own)
        return [
            Sample(prompt, tokens, log_probs, version)
            for prompt, (tokens, log_probs) in zip(prompt_token_ids, drawn, strict=True)
        ]

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.close_weights()
        self.model = None
