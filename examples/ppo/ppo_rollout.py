"""A rollout engine: samples responses with weights that the actor sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rlmesh import RestartEvent, current_worker, rpc

from . import remote_call
from .common import Sample, SamplingParams, pretrained
from .model import sample


class RolloutActor:
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.rank = current_worker().rank
        self.model: Qwen2ForCausalLM | None = None
        self.version: int | None = None

    def on_restart(self, event: RestartEvent) -> None:
        """A process that takes another's place asks the actor for the weights; without any it refuses to sample."""
        self.init(str(pretrained()))
        self.version = None
        if (published := remote_call.published_weights()) is not None:
            self.weight_sync(*published)

    @rpc(remote_call.rollout_init)
    def init(self, model_path: str) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(model_path).eval()
        self.version = 0

    @rpc(remote_call.rollout_generate)
    def generate(self, prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> list[Sample]:
        if self.model is None or self.version is None:
            raise RuntimeError(f"engine {self.rank} has no weights: call rollout_init or rollout_weight_sync first")
        own = SamplingParams(params.max_tokens, params.temperature, params.seed * 1009 + self.rank)
        drawn = sample(self.model, prompt_token_ids, own)
        return [
            Sample(prompt, tokens, log_probs, self.version)
            for prompt, (tokens, log_probs) in zip(prompt_token_ids, drawn, strict=True)
        ]

    @rpc(remote_call.rollout_weight_sync)
    @torch.no_grad()
    def weight_sync(self, version: int, weights: Mapping[str, Tensor]) -> None:
        assert self.model is not None, "rollout_weight_sync before rollout_init"
        mine = dict(self.model.named_parameters())
        # All is checked before anything is written: half of an update is worse than none.
        wrong = [n for n in mine.keys() | weights.keys() if n not in mine or n not in weights]
        wrong += [n for n in mine.keys() & weights.keys() if mine[n].shape != weights[n].shape]
        if wrong:
            raise ValueError(f"weights of version {version} do not fit engine {self.rank}: {sorted(wrong)}")
        self.version = None
        for name, parameter in mine.items():
            parameter.copy_(weights[name])
        self.version = version

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.model = None
        self.version = None
