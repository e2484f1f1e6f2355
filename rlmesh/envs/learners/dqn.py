"""The learner of DQN."""

from __future__ import annotations

import torch
from torch.nn.functional import smooth_l1_loss

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.off_policy import OffPolicyLearner
from rlmesh.envs.learners.schedule import scheduled
from rlmesh.envs.modules.q_module import QModule

__all__ = ["DQNLearner"]


class DQNLearner(OffPolicyLearner):
    """Q-learning with a target network (Mnih et al. 2015), by default double (van Hasselt et al. 2016).

    The target of a transition is r + γ^k · Q⁻(s', argmax_a Q(s', a)), or, with ``double_q=False``,
    r + γ^k · max_a Q⁻(s', a). The loss is Huber's, weighted by ``weights`` if the batch has them.
    """

    module: QModule

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        module, new_obs = self.module, batch[columns.NEW_OBS]
        assert isinstance(self.target, QModule)
        with torch.no_grad():
            late = self.target.values(new_obs)
            if self.config["double_q"]:
                best = module.values(new_obs).argmax(-1, keepdim=True)
                following = late.gather(-1, best).squeeze(-1)
            else:
                following = late.amax(-1)
            targets = batch[columns.REWARDS] + self.discounts(batch) * following
        chosen = batch[columns.ACTIONS].long().unsqueeze(-1) - int(module.action_space.start)
        values = module.values(batch[columns.OBS]).gather(-1, chosen).squeeze(-1)
        losses = smooth_l1_loss(values, targets, reduction="none")
        loss = (losses * batch["weights"]).mean() if "weights" in batch else losses.mean()
        self.descend("loss", loss, self.optimizer, self._parameters)
        self.td_errors = (targets - values.detach()).numpy()
        if (self.updates + 1) % self.config["target_network_update_freq"] == 0:
            self.follow(self.config["tau"])
        return {"total_loss": loss.detach(), "qf_mean": values.detach().mean(), "td_error": losses.detach().mean()}

    def prepare_exploration(self, sampled: int) -> None:
        self.module.epsilon.fill_(scheduled(self.config["epsilon"], sampled))  # type: ignore[operator]
