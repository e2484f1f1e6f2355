"""The learner of TD3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.off_policy import AnyOptimizer, OffPolicyLearner, frozen, trainable
from rlmesh.envs.modules.continuous import TD3Module

__all__ = ["TD3Learner"]


class TD3Learner(OffPolicyLearner):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, algorithm 1).

    The target of a transition is r + γ^k · min_i Q⁻_i(s', clip(π⁻(s') + clip(ε, −c, c))). Actor and targets are updated
    with every ``policy_delay``-th update of the critics.
    """

    module: TD3Module

    def __init__(self, module: Any, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self._critic, self._actor = (trainable(part) for part in (self.module.critic, self.module.actor))
        self.optimizer, self.actor_optimizer = self.adam(self._critic), self.adam(self._actor)
        self._actor_loss = torch.tensor(0.0)

    def followed(self) -> nn.Module:
        return nn.ModuleDict({"actor": self.module.actor, "critic": self.module.critic})

    def optimizers(self) -> list[AnyOptimizer]:
        return [self.optimizer, self.actor_optimizer]

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        config, obs, new_obs = self.config, batch[columns.OBS], batch[columns.NEW_OBS]
        assert isinstance(self.target, nn.ModuleDict)
        with torch.no_grad():
            best = torch.tanh(self.target["actor"](new_obs))
            noise = torch.randn(best.shape, generator=self.generator) * config["target_noise"]
            clip = config["target_noise_clip"]
            following = (best + noise.clamp(-clip, clip)).clamp(-1, 1)
            late = self.target["critic"](new_obs, following).amin(0)
            targets = batch[columns.REWARDS] + self.discounts(batch) * late
        values = self.module.critic(obs, batch[columns.ACTIONS])
        errors = (values - targets).square()
        critic_loss = (errors * batch["weights"] if "weights" in batch else errors).mean(-1).sum()
        self.descend("critic loss", critic_loss, self.optimizer, self._critic)
        self.td_errors = (targets - values.detach().mean(0)).numpy()
        if (self.updates + 1) % config["policy_delay"] == 0:
            with frozen(self._critic):
                actor_loss = -self.module.critic(obs, torch.tanh(self.module.actor(obs)))[0].mean()
            self.descend("actor loss", actor_loss, self.actor_optimizer, self._actor)
            self._actor_loss = actor_loss.detach()
            self.follow(config["tau"])
        return {
            "critic_loss": critic_loss.detach(), "actor_loss": self._actor_loss, "qf_mean": values.detach().mean(),
        }  # fmt: skip

    def prepare_exploration(self, sampled: int) -> None:
        starts = self.config["num_steps_sampled_before_learning_starts"]
        self.module.uniform.fill_(float(sampled < starts))  # type: ignore[operator]
        self.module.noise.fill_(self.config["exploration_noise"])  # type: ignore[operator]
