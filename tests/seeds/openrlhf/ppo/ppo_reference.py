"""The reference model of document 002, as a stub."""

# A type checker takes @rpc(stub) for @rpc on the stub.
# mypy: disable-error-code="arg-type, call-arg"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmesh import rpc

from . import remote_call
from .model_roles import ModelRole


class PPOReferenceActor(ModelRole):
    @rpc(remote_call.reference_init)
    def start(self, strategy: Any, model_path: str) -> str:
        return self.init_model(strategy, model_path)

    @rpc(remote_call.reference_forward)
    def forward(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.require_init()
        return [-sequence for sequence in sequences]

    @rpc
    def end_job(self) -> None:
        self.ended = True
