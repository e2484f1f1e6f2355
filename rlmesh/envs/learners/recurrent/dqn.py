"""The learner of DQN with memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn.functional import smooth_l1_loss

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.dqn import DQNLearner
from rlmesh.envs.learners.sequences import state_columns, states_in, with_the_last, zeroed
from rlmesh.envs.modules.q_module import QModule
from rlmesh.envs.modules.rl_module import RLModule

__all__ = ["RecurrentDQNLearner"]

LEARN_MASK = "learn_mask"


class RecurrentDQNLearner(DQNLearner):
    """Q-learning from replayed sequences that begin with their stored state (Kapturowski et al. 2019, "R2D2").

    Both networks run over the whole sequence, and over the observation after its last step. The loss is that of the
    steps behind the burn-in. Targets are those of `DQNLearner`, over up to ``n_step`` steps within the sequence.
    Differences to the paper: gradients flow through the burn-in too, and values are not rescaled.
    """

    module: QModule
    recurrent: ClassVar = True

    def __init__(self, module: RLModule, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self.wants = (*DQNLearner.wants, columns.MASK, LEARN_MASK, *state_columns(self.states))  # type: ignore[misc,assignment]

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert isinstance(self.target, QModule)
        mask, learn, states = batch[columns.MASK], batch[LEARN_MASK], states_in(batch)
        obs = with_the_last(zeroed(batch[columns.OBS], mask), batch[columns.NEW_OBS], mask)
        values, _ = self.module.values_over(obs, states)
        with torch.no_grad():
            late, _ = self.target.values_over(obs, states)
            best = (values if self.config["double_q"] else late).argmax(-1, keepdim=True)
            after = late.gather(-1, best).squeeze(-1)[:, 1:]
            targets = self._targets(zeroed(batch[columns.REWARDS], mask), after, batch[columns.TERMINATEDS], mask)
        chosen = batch[columns.ACTIONS][learn].long().unsqueeze(-1) - int(self.module.action_space.start)
        found, wanted = values[:, :-1][learn].gather(-1, chosen).squeeze(-1), targets[learn]
        count = max(len(found), 1)  # sequences that end within their burn-in have no step to learn from
        losses = smooth_l1_loss(found, wanted, reduction="none")
        if "weights" in batch:  # one for each sequence
            losses = losses * batch["weights"][learn.nonzero(as_tuple=True)[0]]
        loss = losses.sum() / count
        if len(found):
            self.descend("loss", loss, self.optimizer, self._parameters)
        self.td_errors = (wanted - found.detach()).numpy()
        if (self.updates + 1) % self.config["target_network_update_freq"] == 0:
            self.follow(self.config["tau"])
        return {"total_loss": loss.detach(), "qf_mean": found.detach().sum() / count, "td_error": loss.detach()}

    def _targets(
        self, rewards: torch.Tensor, after: torch.Tensor, terminateds: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Targets ``[sequences, time]`` of the values ``after`` each step; n steps where the sequence has so many."""
        gamma = self.config["gamma"]
        after = after.masked_fill(terminateds, 0.0)
        goes_on = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
        targets = rewards + gamma * after
        for _ in range(self.config["n_step"] - 1):
            following = torch.cat([targets[:, 1:], torch.zeros_like(targets[:, :1])], 1)
            targets = rewards + gamma * torch.where(goes_on, following, after)
        result: torch.Tensor = targets
        return result
