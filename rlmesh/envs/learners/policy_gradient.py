"""Learners of policy gradients: actor-critic (VPG, A2C) and PPO."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.learner import Learner, writable
from rlmesh.envs.learners.partners import ALONE, Partners
from rlmesh.envs.learners.schedule import scheduled

__all__ = ["ActorCriticLearner", "PPOLearner"]


class ActorCriticLearner(Learner):
    """The policy gradient with a value function as its baseline (Sutton et al. 2000; Mnih et al. 2016).

    ``−log π(a|s)·A + c_v·(V(s) − target)² − c_e·H``
    """

    recurrent: ClassVar = True
    wants: ClassVar = (columns.OBS, columns.ACTIONS, columns.ADVANTAGES, columns.VALUE_TARGETS)

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, distribution = self.config, self.module.distribution
        assert distribution is not None
        outputs, batch = self.forward(batch)
        inputs = outputs[columns.ACTION_DIST_INPUTS]
        advantages = _advantages(batch, self)
        policy_loss = -(distribution.log_prob(inputs, batch[columns.ACTIONS]) * advantages).mean()
        vf_loss = (outputs[columns.VF_PREDS] - batch[columns.VALUE_TARGETS]).square().mean()
        entropy = distribution.entropy(inputs).mean()
        entropy_coeff = scheduled(config["entropy_coeff"], self.steps)
        loss = policy_loss + config["vf_loss_coeff"] * vf_loss - entropy_coeff * entropy
        stats = {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy}
        return loss, {name: value.detach() for name, value in stats.items()}


class PPOLearner(Learner):
    """Proximal policy optimization with the clipped ratio (Schulman et al. 2017, equations 7 to 9).

    ``vf_clip_param`` bounds the squared error of a value. With ``kl_coeff`` above 0, the divergence from the sampling
    policy is a part of the loss, and the coefficient follows ``kl_target`` (section 4 of the paper).
    """

    recurrent: ClassVar = True
    wants: ClassVar = (
        columns.OBS, columns.ACTIONS, columns.ACTION_LOGP, columns.ACTION_DIST_INPUTS, columns.ADVANTAGES,
        columns.VALUE_TARGETS,
    )  # fmt: skip

    def __init__(self, module: Any, config: Any) -> None:
        super().__init__(module, config)
        self.kl_coeff = float(self.config["kl_coeff"])
        self.before_update()

    def tensors_of(self, batch: SampleBatch, *, may_be_empty: bool = False) -> dict[str, torch.Tensor]:
        if self.config["standardize_advantages"] == "batch" and columns.ADVANTAGES in batch:
            given = torch.from_numpy(writable(batch[columns.ADVANTAGES]))
            batch = SampleBatch({**batch, columns.ADVANTAGES: standardized(given, self.partners).numpy()})
        return super().tensors_of(batch, may_be_empty=may_be_empty)

    def before_update(self) -> None:
        self.clip = scheduled(self.config["clip_param"], self.steps)
        self.entropy_coeff = scheduled(self.config["entropy_coeff"], self.steps)

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, distribution = self.config, self.module.distribution
        assert distribution is not None
        outputs, batch = self.forward(batch)
        inputs = outputs[columns.ACTION_DIST_INPUTS]
        advantages = _advantages(batch, self)
        ratio = torch.exp(distribution.log_prob(inputs, batch[columns.ACTIONS]) - batch[columns.ACTION_LOGP])
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages).mean()
        error = (outputs[columns.VF_PREDS] - batch[columns.VALUE_TARGETS]).square()
        vf_loss = (error if config["vf_clip_param"] is None else error.clamp(max=config["vf_clip_param"])).mean()
        loss = policy_loss + config["vf_loss_coeff"] * vf_loss
        stats = {"policy_loss": policy_loss, "vf_loss": vf_loss}
        reports = self.reports or type(self) is not PPOLearner  # a subclass may read them in each pass
        if self.entropy_coeff or reports:
            stats["entropy"] = distribution.entropy(inputs if self.entropy_coeff else inputs.detach()).mean()
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * stats["entropy"]
        if self.kl_coeff or reports:
            before = batch[columns.ACTION_DIST_INPUTS]
            stats["kl"] = distribution.kl(before, inputs if self.kl_coeff else inputs.detach()).mean()
        if self.kl_coeff:
            loss = loss + self.kl_coeff * stats["kl"]
        return loss, {name: value.detach() for name, value in stats.items()}

    def after_update(self, stats: dict[str, float]) -> None:
        if self.kl_coeff:
            if stats["kl"] > 2.0 * self.config["kl_target"]:
                self.kl_coeff *= 1.5
            elif stats["kl"] < 0.5 * self.config["kl_target"]:
                self.kl_coeff *= 0.5
            stats["curr_kl_coeff"] = self.kl_coeff

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "kl_coeff": self.kl_coeff}

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.kl_coeff = state["kl_coeff"]


def standardized(advantages: torch.Tensor, partners: Partners = ALONE) -> torch.Tensor:
    """Advantages with mean 0 and standard deviation 1 over all partners; a single one unchanged."""
    if partners.size > 1:
        mean, std = partners.mean_and_std(advantages)
        return (advantages - mean) / (std + 1e-8)
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def _advantages(batch: dict[str, torch.Tensor], learner: Learner) -> torch.Tensor:
    found = batch[columns.ADVANTAGES]
    return standardized(found, learner.partners) if learner.config["standardize_advantages"] is True else found
