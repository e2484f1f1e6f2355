"""`ReferenceRole`: holds the reference policy, from which the divergence is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmesh import rpc
from rlmesh.rl.engines.training.packed import PackedInputs, prepare
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.defaults import causal_model, choose_device, run_settings
from rlmesh.rl.roles.device_turns import TakesTurns
from rlmesh.rl.roles.frozen import FrozenModel

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["REFERENCE", "FrozenPolicy", "ReferenceRole", "reference_model"]

REFERENCE = "reference"


class FrozenPolicy(FrozenModel):
    """A causal language model that is not trained, on packs.

    Args:
        model: the model in eval mode, on its device.
        temperature: the temperature of sampling, which log-probabilities are computed at.
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        prepare(model)
        super().__init__(model)
        self.temperature = temperature

    def log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs, ``[targets]`` each."""
        with torch.no_grad():
            found = [self.model(packed=PackedInputs(pack, self.device), temperature=self.temperature) for pack in packs]
        return [terms.log_probs.float().cpu().numpy() for terms in found]


class ReferenceRole(TakesTurns):
    """Computes log-probabilities by the reference policy: ``reference.model``, or the policy before training."""

    def setup(self) -> None:
        self.run_settings: Run = run_settings()
        self.device = choose_device(self.run_settings.actor.threads)
        self.turns = self.make_turns()
        with self.turns.lease():
            self.policy = FrozenPolicy(self.make_model(), self.run_settings.rollout.temperature)
            self.turns.add(REFERENCE, wake=self.policy.wake, sleep=self.policy.sleep)

    def make_model(self) -> nn.Module:
        """The model of the reference, in float32, on this member's device."""
        return reference_model(self.run_settings, self.device)

    @rpc
    def reference_log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs, ``[targets]`` each, at the sampling temperature."""
        with self.turns.turn(REFERENCE):
            return self.policy.log_probs(packs)


def reference_model(run: Run, device: torch.device) -> nn.Module:
    """The model of the reference policy, in eval mode."""
    return causal_model(run.reference.model or run.model, device).eval()
