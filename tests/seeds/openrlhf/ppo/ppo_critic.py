"""The critic of document 002, as a stub."""

# A type checker takes @rpc(stub) for @rpc on the stub.
# mypy: disable-error-code="arg-type, call-arg"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmesh import current_worker, rpc

from . import remote_call
from .model_roles import ModelRole


class CriticModelRayActor(ModelRole):
    def __init__(self) -> None:
        self.experience: list[dict[str, Any]] = []
        self.updates = 0

    @rpc
    def critic_init(self, strategy: Any, model_path: str) -> str:
        return self.init_model(strategy, model_path)

    @rpc("critic_forward")
    def forward(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.require_init()
        return [sequence.float().mean() for sequence in sequences]

    @rpc(remote_call.critic_append_experience)
    def append(self, experiences: Sequence[dict[str, Any]]) -> None:
        self.experience.extend(experiences)

    @rpc()
    def critic_update(self) -> int:
        used, self.experience = len(self.experience), []
        self.updates += 1
        return used

    @rpc(export=True)
    def save_checkpoint(self, tag: str) -> str:
        path = current_worker().run_dir / f"{tag}-{current_worker().name}"
        path.write_text(str(self.updates))
        return str(path)

    @rpc
    def end_job(self) -> None:
        self.ended = True
