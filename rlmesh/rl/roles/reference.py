"""`ReferenceRole`: the policy before training, which the divergence is measured from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmesh import current_worker, rpc
from rlmesh.rl.engines.training.packed import PackedInputs, prepare
from rlmesh.rl.packing import Pack

__all__ = ["ReferenceRole"]


class ReferenceRole:
    """Computes log-probabilities with the weights that the run begins with."""

    def setup(self) -> None:
        self.run_settings: Any = current_worker().job_info.user_config
        if self.run_settings.actor.threads and not torch.cuda.is_available():
            torch.set_num_threads(self.run_settings.actor.threads)
        self.device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self.model = self.make_model()
        prepare(self.model)

    def make_model(self) -> nn.Module:
        """The model of the reference: the run's, in float32, on this member's device."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.run_settings.model, dtype=torch.float32)
        return model.to(self.device).eval()

    @rpc
    def log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs, ``[targets]`` each, at the sampling temperature."""
        temperature = self.run_settings.rollout.temperature
        with torch.no_grad():
            found = [self.model(packed=PackedInputs(pack, self.device), temperature=temperature) for pack in packs]
        return [terms.log_probs.float().cpu().numpy() for terms in found]
