"""The learner of recorded steps: MARWIL, and with ``beta=0`` behaviour cloning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.learner import Learner
from rlmesh.envs.modules.rl_module import RLModule

__all__ = ["MARWILLearner"]


class MARWILLearner(Learner):
    """Imitation that prefers actions with high returns (Wang et al. 2018, algorithm 1).

    ``−exp(β·A/c)·log π(a|s) + c_v·½·A²`` with ``A = R − V(s)``; c² is a moving average of A². With β = 0, every action
    has the same weight and values are not learnt: behaviour cloning.
    """

    recurrent: ClassVar = True

    def __init__(self, module: RLModule, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        imitates = (columns.OBS, columns.ACTIONS)
        self.wants = imitates if self.config["beta"] == 0 else (*imitates, columns.VALUE_TARGETS)  # type: ignore[misc]
        self.squared_norm = float(self.config["moving_average_sqd_adv_norm_start"])

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, distribution = self.config, self.module.distribution
        assert distribution is not None
        outputs, batch = self.forward(batch)
        inputs = outputs[columns.ACTION_DIST_INPUTS]
        logp = distribution.log_prob(inputs, batch[columns.ACTIONS])
        entropy = distribution.entropy(inputs).mean()
        if config["beta"] == 0:
            loss = -logp.mean()
            return loss, {"policy_loss": loss.detach(), "entropy": entropy.detach()}
        advantages = batch[columns.VALUE_TARGETS] - outputs[columns.VF_PREDS]
        squares = advantages.square()
        self._average(squares.detach())
        weights = torch.exp(config["beta"] * advantages.detach() / (1e-8 + self.squared_norm**0.5))
        policy_loss = -(weights * logp).mean()
        vf_loss = 0.5 * squares.mean()
        stats = {
            "policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy,
            "moving_average_sqd_adv_norm": torch.full_like(vf_loss, self.squared_norm),
        }  # fmt: skip
        return policy_loss + config["vf_coeff"] * vf_loss, {name: value.detach() for name, value in stats.items()}

    @contextmanager
    def _kept_if_it_fails(self) -> Iterator[None]:
        norm = self.squared_norm  # once it is infinite, all weights would be 1 for good
        try:
            with super()._kept_if_it_fails():
                yield
        except BaseException:
            self.squared_norm = norm
            raise

    def _average(self, squares: torch.Tensor) -> None:
        """Move the average by the mean over the rows of all partners."""
        total = torch.stack([squares.double().sum(), torch.tensor(float(len(squares)), dtype=torch.float64)])
        self.partners.add(total)
        mean = float(total[0] / total[1])
        self.squared_norm += self.config["moving_average_sqd_adv_norm_update_rate"] * (mean - self.squared_norm)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "squared_norm": self.squared_norm}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.squared_norm = state["squared_norm"]
