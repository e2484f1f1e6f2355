"""The reward role: scores responses by a rule, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from rlmesh import rpc
from rlmesh.rl.rewards import Response

from . import remote_call
from .common import exact_match


class RewardModelRayActor:
    @rpc(remote_call.reward_forward)
    def forward(self, samples: Sequence[Response], ground_truths: Sequence[str]) -> list[float]:
        return [exact_match(sample, truth) for sample, truth in zip(samples, ground_truths, strict=True)]
