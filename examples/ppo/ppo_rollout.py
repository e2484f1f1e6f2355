"""A rollout engine: samples responses with the weights that it was pushed last."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import Qwen2ForCausalLM

from rlmesh import ReceivesWeights, RestartEvent, current_worker, rpc
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from rlmesh.rl.engines.transformers import TransformersEngine

from . import remote_call
from .common import pretrained
from .model import PAD_ID


class RolloutActor(ReceivesWeights):
    engine: RolloutEngine

    def setup(self) -> None:
        torch.set_num_threads(1)
        self.rank = current_worker().rank

    def on_restart(self, event: RestartEvent) -> None:
        """A process that takes another's place refuses to sample until it is pushed the weights."""
        self.init(str(pretrained()))

    @rpc(remote_call.rollout_init)
    def init(self, model_path: str) -> None:
        self.engine = TransformersEngine(Qwen2ForCausalLM.from_pretrained(model_path).eval(), pad_token_id=PAD_ID)
        self.receive_weights(self.engine.sink)

    @rpc(remote_call.rollout_generate)
    def generate(self, prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> list[Sample]:
        own = dataclasses.replace(params, seed=(params.seed or 0) * 1009 + self.rank)
        return self.engine.generate(prompt_token_ids, own)

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.close_weights()
        self.engine.close()
