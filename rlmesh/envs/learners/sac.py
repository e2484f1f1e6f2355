"""The learner of SAC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.off_policy import AnyOptimizer, OffPolicyLearner, frozen, trainable
from rlmesh.envs.modules.continuous import SACModule, TwinCritic

__all__ = ["SACLearner"]


class SACLearner(OffPolicyLearner):
    """Soft actor-critic with two critics and a learnt temperature α (Haarnoja et al. 2018, arXiv:1812.05905).

    The target of a transition is r + γ^k · (min_i Q⁻_i(s', a') − α log π(a'|s')) with a' drawn from the policy. The
    policy maximises min_i Q_i(s, a) − α log π(a|s); α follows the target entropy, by default minus the number of
    dimensions of an action.
    """

    module: SACModule
    target: TwinCritic

    def __init__(self, module: Any, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self.log_alpha = torch.tensor(math.log(self.config["initial_alpha"]), requires_grad=True)
        self._critic, self._actor = (trainable(part) for part in (self.module.critic, self.module.actor))
        self.optimizer, self.actor_optimizer = self.adam(self._critic), self.adam(self._actor)
        self.alpha_optimizer = self.adam([self.log_alpha])
        wanted = self.config["target_entropy"]
        self.target_entropy = -float(self.module.distribution.dim) if wanted == "auto" else float(wanted)

    def followed(self) -> TwinCritic:
        return self.module.critic

    def optimizers(self) -> list[AnyOptimizer]:
        return [self.optimizer, self.actor_optimizer, self.alpha_optimizer]

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        obs, alpha = batch[columns.OBS], self.log_alpha.exp().detach()
        with torch.no_grad():
            following, log_prob = self._drawn(batch[columns.NEW_OBS])
            late = self.target(batch[columns.NEW_OBS], following).amin(0) - alpha * log_prob
            targets = batch[columns.REWARDS] + self.discounts(batch) * late
        values = self.module.critic(obs, batch[columns.ACTIONS])
        errors = (values - targets).square()
        critic_loss = 0.5 * (errors * batch["weights"] if "weights" in batch else errors).mean(-1).sum()
        self.descend("critic loss", critic_loss, self.optimizer, self._critic)
        self.td_errors = (targets - values.detach().mean(0)).numpy()
        actions, log_prob = self._drawn(obs)
        with frozen(self._critic):
            actor_loss = (alpha * log_prob - self.module.critic(obs, actions).amin(0)).mean()
        self.descend("actor loss", actor_loss, self.actor_optimizer, self._actor)
        entropy = -log_prob.detach().mean()
        self.descend("temperature loss", self.log_alpha * (entropy - self.target_entropy), self.alpha_optimizer,
                     [self.log_alpha])  # fmt: skip
        self.follow(self.config["tau"])
        return {
            "critic_loss": critic_loss.detach(), "actor_loss": actor_loss.detach(), "alpha_value": alpha,
            "entropy": entropy, "qf_mean": values.detach().mean(),
        }  # fmt: skip

    def _drawn(self, obs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions of the policy, ``[rows, dim]``, and their log-densities."""
        inputs = self.module.actor(obs)
        normal = torch.randn((len(inputs), self.module.distribution.dim), generator=self.generator)
        return self.module.distribution.rsample(inputs, normal)

    def prepare_exploration(self, sampled: int) -> None:
        starts = self.config["num_steps_sampled_before_learning_starts"]
        self.module.uniform.fill_(float(sampled < starts))  # type: ignore[operator]

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "log_alpha": self.log_alpha.detach().clone()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
