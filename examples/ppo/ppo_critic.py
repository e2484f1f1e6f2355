"""The critic: estimates the future reward before each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from rlmesh import rpc
from rlmesh.rl import TrainingEngine
from rlmesh.rl.engines.training.forward import response_values
from rlmesh.rl.losses import aggregate, value_clip_loss

from . import remote_call
from .common import Experience, job_config
from .model import ValueModel
from .training import Learner, make_engine


class CriticModelActor:
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.config = job_config()
        self.experience: Experience | None = None
        self.engine: TrainingEngine | None = None
        dist.init_process_group("gloo")

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.close()
        dist.destroy_process_group()

    @rpc(remote_call.critic_init)
    def init(self, model_path: str) -> None:
        critic = ValueModel(Qwen2ForCausalLM.from_pretrained(model_path))
        if self.engine is not None:
            self.engine.close()
        self.engine = make_engine(self.config.critic_engine, critic, self.config, lr=self.config.critic_lr)
        self.learner = Learner(self.engine, self.config)

    @rpc(remote_call.critic_forward)
    def forward(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        return self.learner.engine.values(sequences, attention_mask, action_mask)

    @rpc(remote_call.append_experience)
    def append_experience(self, experience: Experience) -> None:
        self.experience = experience

    @rpc(remote_call.critic_update)
    def update(self) -> dict[str, float]:
        if self.experience is None:
            raise RuntimeError("critic_update before append_experience: there is nothing to train on")
        experience, self.experience = self.experience, None
        return self.learner.update(experience, self._loss)

    def _loss(self, model: nn.Module, part: Experience, count: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        mask = part.action_mask
        values = response_values(model, part.sequences, part.attention_mask, mask)
        terms = value_clip_loss(values, part.values, part.returns, mask, clip=self.config.value_clip)
        loss = aggregate(terms.loss, mask, "token-mean", denominator=count)
        return loss, {"value_loss": loss}

    @rpc(remote_call.save_checkpoint)
    def save_checkpoint(self, directory: str, step: int) -> None:
        self.learner.engine.save(Path(directory) / "critic").result()

    @rpc(remote_call.restore)
    def restore(self, directory: str) -> None:
        self.learner.engine.load(Path(directory) / "critic")

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.experience = None
