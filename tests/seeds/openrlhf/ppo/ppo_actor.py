"""The policy of document 002, as a stub of two ranks: it returns numbers that the trainer can predict."""

# A type checker takes @rpc(stub) for @rpc on the stub.
# mypy: disable-error-code="arg-type, call-arg"
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from rlmesh import current_worker, rpc

from . import remote_call
from .model_roles import ModelRole


class PolicyModelActor(ModelRole):
    def __init__(self) -> None:
        self.experience: list[dict[str, Any]] = []
        self.updates = 0

    @rpc(remote_call.actor_init)
    def init_model_from_pretrained(self, strategy: Any, model_path: str) -> tuple[str, str, str]:
        return self.init_model(strategy, model_path), os.environ["RANK"], os.environ["WORLD_SIZE"]

    @rpc(remote_call.actor_forward)
    def forward(
        self,
        sequences: Sequence[torch.Tensor],
        action_mask: Sequence[torch.Tensor],
        attention_mask: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        self.require_init()
        assert len(sequences) == len(action_mask) == len(attention_mask)
        return [s * a - current_worker().rank for s, a in zip(sequences, action_mask, strict=True)]

    @rpc(remote_call.actor_append_experience)
    def append(self, experiences: Sequence[dict[str, Any]]) -> None:
        self.experience.extend(experiences)

    @rpc(remote_call.actor_update)
    def fit(self) -> dict[str, int]:
        used, self.experience = len(self.experience), []
        self.updates += 1
        return {"samples": used, "updates": self.updates}

    @rpc
    def broadcast_to_vllm(self, version: int) -> None:
        if current_worker().rank == 0:
            remote_call.weight_sync(version)

    @rpc
    def save_checkpoint(self, tag: str) -> str:
        path = current_worker().run_dir / f"{tag}-{current_worker().name}"
        path.write_text(str(self.updates))
        return str(path)

    @rpc
    def end_job(self) -> None:
        self.ended = True
