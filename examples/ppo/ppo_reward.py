"""The reward role: scores responses by a rule, in a process of its own."""

from collections.abc import Sequence

from rlmesh import rpc

from . import remote_call
from .common import score


class RewardModelRayActor:
    @rpc(remote_call.reward_forward)
    def forward(self, texts: Sequence[str], ended: Sequence[bool], truths: Sequence[str]) -> list[float]:
        return [score(*response) for response in zip(texts, ended, truths, strict=True)]
