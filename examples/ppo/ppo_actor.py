"""The actor: the policy in training, sharded over its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from rlmesh import SendsWeights, rpc
from rlmesh.rl import TrainingEngine
from rlmesh.rl.engines.training.forward import response_logits
from rlmesh.rl.losses import aggregate, entropy, ppo_clip_loss, token_log_probs

from . import remote_call
from .common import Experience, job_config, trained
from .training import Learner, make_engine


class PolicyModelActor(SendsWeights):
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

    @rpc(remote_call.actor_init)
    def init(self, model_path: str) -> None:
        policy = Qwen2ForCausalLM.from_pretrained(model_path)
        if self.engine is not None:
            self.engine.close()
        self.engine = make_engine(self.config.actor_engine, policy, self.config, lr=self.config.actor_lr)
        self.learner = Learner(self.engine, self.config)
        self.send_weights(self.engine.named_tensors(), restored=0)

    @rpc(remote_call.actor_forward)
    def forward(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        temperature = self.config.temperature
        return self.learner.engine.log_probs(sequences, attention_mask, action_mask, temperature=temperature)

    @rpc(remote_call.append_experience)
    def append_experience(self, experience: Experience) -> None:
        self.experience = experience

    @rpc(remote_call.actor_update)
    def update(self) -> dict[str, float]:
        if self.experience is None:
            raise RuntimeError("actor_update before append_experience: there is nothing to train on")
        experience, self.experience = self.experience, None
        return self.learner.update(experience, self._loss)

    def _loss(self, model: nn.Module, part: Experience, count: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        width, mask = part.action_mask.shape[1], part.action_mask
        temperature = self.config.temperature
        logits = response_logits(model, part.sequences, part.attention_mask, width)
        log_probs = token_log_probs(logits, part.sequences[:, -width:], mask, temperature=temperature)
        terms = ppo_clip_loss(log_probs, part.log_probs, part.advantages, mask, clip_low=self.config.clip)

        def share(per_token: Tensor) -> Tensor:
            return aggregate(per_token, mask, "token-mean", denominator=count)

        policy_loss, spread = share(terms.loss), share(entropy(logits, mask, temperature=temperature))
        statistics = {
            "policy_loss": policy_loss,
            "entropy": spread,
            "ratio": share(terms.ratio),
            "clip_fraction": share(terms.clipped.float()),
        }
        return policy_loss - self.config.entropy_coef * spread, statistics

    @rpc(remote_call.save_checkpoint)
    def save_checkpoint(self, directory: str, step: int) -> None:
        self.learner.engine.save(Path(directory) / "actor").result()

    @rpc(remote_call.restore)
    def restore(self, directory: str) -> None:
        self.learner.engine.load(Path(directory) / "actor")
        # Report the version of the restored weights: a push refuses an actor that lost steps without reporting it.
        self.send_weights(self.learner.engine.named_tensors(), restored=self.learner.updates)

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        """Export the trained policy to a folder for `from_pretrained`."""
        self.learner.engine.export(trained())
        self.experience = None
