"""`ReferenceRole`: the policy before training, which the divergence is measured from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmesh import rpc
from rlmesh.rl.engines.training.offload import Offloaded, own_memory
from rlmesh.rl.engines.training.packed import PackedInputs, prepare
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.defaults import choose_device, run_settings
from rlmesh.rl.roles.turns import TakesTurns

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["REFERENCE", "FrozenPolicy", "ReferenceRole"]

REFERENCE = "reference"


class FrozenPolicy:
    """A causal language model that is not trained, on packs.

    Args:
        model: in eval mode, on its device.
        temperature: that of sampling.
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        prepare(model)
        own_memory([*model.parameters(), *model.buffers()])
        self.device = next(model.parameters()).device
        self._offloaded: Offloaded | None = None

    def log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs, ``[targets]`` each."""
        with torch.no_grad():
            found = [self.model(packed=PackedInputs(pack, self.device), temperature=self.temperature) for pack in packs]
        return [terms.log_probs.float().cpu().numpy() for terms in found]

    def sleep(self) -> None:
        """Move the weights to host memory."""
        if self._offloaded is None:
            self._offloaded = Offloaded([*self.model.parameters(), *self.model.buffers()], None)

    def wake(self) -> None:
        """Move the weights back."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None


class ReferenceRole(TakesTurns):
    """Computes log-probabilities with the weights that the run begins with."""

    def setup(self) -> None:
        self.run_settings: Run = run_settings()
        self.device = choose_device(self.run_settings.actor.threads)
        self.turns = self.make_turns()
        with self.turns.lease():
            self.policy = FrozenPolicy(self.make_model(), self.run_settings.rollout.temperature)
            self.turns.add(REFERENCE, wake=self.policy.wake, sleep=self.policy.sleep)

    def make_model(self) -> nn.Module:
        """The model of the reference: the run's, in float32, on this member's device."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.run_settings.model, dtype=torch.float32)
        return model.to(self.device).eval()

    @rpc
    def reference_log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs, ``[targets]`` each, at the sampling temperature."""
        with self.turns.turn(REFERENCE):
            return self.policy.log_probs(packs)
