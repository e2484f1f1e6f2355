"""The learners of SAC and TD3 with memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.off_policy import OffPolicyLearner
from rlmesh.envs.learners.recurrent.dqn import LEARN_MASK
from rlmesh.envs.learners.sac import SACLearner
from rlmesh.envs.learners.sequences import state_columns, states_in, with_the_last, zeroed
from rlmesh.envs.learners.td3 import TD3Learner
from rlmesh.envs.modules.recurrent import SequenceSteps
from rlmesh.envs.modules.rl_module import RLModule

__all__ = ["RecurrentSACLearner", "RecurrentTD3Learner", "transitions_of"]


class SequenceLearner(OffPolicyLearner):
    """Makes the transitions of another learner of replayed sequences that begin with their stored states.

    Each network runs over the whole sequence, from the state that the runner recorded at its first step (Kapturowski et
    al. 2019, "R2D2"), and over the observation after its last step. The updates are those of the other learner, for the
    steps behind the burn-in. Gradients flow through the burn-in too.
    """

    recurrent: ClassVar = True

    def __init__(self, module: RLModule, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self.wants = (*type(self).wants, columns.MASK, LEARN_MASK, *state_columns(self.states))  # type: ignore[misc,assignment]

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One update; without statistics if no sequence has a step behind its burn-in, and so nothing changes."""
        transitions = transitions_of(batch, self.config["n_step"], self.config["gamma"])
        if not len(transitions[columns.REWARDS]):
            self.td_errors = np.zeros(0, np.float32)
            return {}
        return super().step(transitions)


class RecurrentSACLearner(SequenceLearner, SACLearner):
    """Soft actor-critic from replayed sequences: policy and critics have a memory each (Ni et al. 2022)."""


class RecurrentTD3Learner(SequenceLearner, TD3Learner):
    """TD3 from replayed sequences: policy and critics have a memory each (Ni et al. 2022)."""


def transitions_of(batch: Mapping[str, torch.Tensor], n_step: int, gamma: float) -> dict[str, Any]:
    """The steps to learn from, as transitions of up to ``n_step`` steps within their sequence.

    Args:
        batch: of a `SequenceReplayBuffer`, ``[sequences, time, …]``.
        n_step, gamma: rewards are r_0 + γ r_1 + … + γ^(k−1) r_(k−1) with k = ``n_steps`` of the row.

    Returns:
        Columns ``[rows, …]``; ``obs`` and ``new_obs``, that after the k steps, are `SequenceSteps`.
    """
    mask, states = batch[columns.MASK], states_in(batch)
    obs = with_the_last(zeroed(batch[columns.OBS], mask), batch[columns.NEW_OBS], mask)
    sequence, time = batch[LEARN_MASK].nonzero(as_tuple=True)
    count = (mask.sum(1)[sequence] - time).clamp(max=n_step)
    rewards = torch.zeros_like(batch[columns.REWARDS][sequence, time])
    for i in range(n_step):
        each = batch[columns.REWARDS][sequence, (time + i).clamp(max=mask.shape[1] - 1)]
        rewards = rewards + torch.where(i < count, gamma**i * each, 0.0)
    weights = {"weights": batch["weights"][sequence]} if "weights" in batch else {}  # one for each sequence
    return {
        **weights,
        columns.OBS: SequenceSteps(obs, states, sequence, time),
        columns.NEW_OBS: SequenceSteps(obs, states, sequence, time + count),
        columns.ACTIONS: batch[columns.ACTIONS][sequence, time], columns.REWARDS: rewards,
        columns.TERMINATEDS: batch[columns.TERMINATEDS][sequence, time + count - 1], "n_steps": count,
    }  # fmt: skip
