"""The reference: the policy before PPO, from which the KL penalty measures the actor's divergence."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rlmesh import RestartEvent, rpc
from rlmesh.rl.engines.training.forward import response_log_probs

from . import remote_call
from .common import job_config, pretrained


class PPOReferenceActor:
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.config = job_config()
        self.model: Qwen2ForCausalLM | None = None

    def on_restart(self, event: RestartEvent) -> None:
        self.init(str(pretrained()))

    @rpc(remote_call.reference_init)
    def init(self, model_path: str) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(model_path).eval()

    @rpc(remote_call.reference_forward)
    @torch.no_grad()
    def forward(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        assert self.model is not None, "reference_forward before reference_init"
        temperature = self.config.temperature
        return response_log_probs(self.model, sequences, attention_mask, action_mask, temperature=temperature)

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.model = None
