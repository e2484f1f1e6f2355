"""The reward model of document 002, as a stub. ``end_job`` is exported as a function of the module."""

# A type checker takes @rpc(stub) for @rpc on the stub.
# mypy: disable-error-code="arg-type, call-arg"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmesh import rpc

from . import remote_call
from .model_roles import ModelRole


@rpc
def end_job() -> str:
    return "ended by a function at the top level of the entry's module"


class RewardModelRayActor(ModelRole):
    @rpc(remote_call.reward_init)
    def start(self, strategy: Any, model_path: str) -> str:
        return self.init_model(strategy, model_path)

    @rpc(remote_call.reward_forward)
    def forward(self, sequences: Sequence[torch.Tensor]) -> list[float]:
        self.require_init()
        return [float(sequence.sum()) for sequence in sequences]
