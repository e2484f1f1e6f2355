"""`ActorRollout` and `ActorRolloutRef`: one process trains the policy, samples with it, and holds the reference.

The parts take turns: the training engine is offloaded while the rollout engine is awake, and vice versa. Weights go
from one to the other through a copy in host memory, so that the two never need the device at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmesh import current_worker, rpc
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.host_copy import HostCopy
from rlmesh.rl.roles.playing import PlaysEpisodes
from rlmesh.rl.roles.reference import REFERENCE, FrozenPolicy
from rlmesh.rl.roles.rollout import ROLLOUT, end_process, engine_params, make_rollout_engine, sample_groups
from rlmesh.rl.roles.trained import TRAINING
from rlmesh.rl.rollout.requests import GroupRequest

__all__ = ["ActorRollout", "ActorRolloutRef"]


class ActorRollout(PlaysEpisodes, ActorRole):
    """One rank of the policy in training, with a rollout engine of its own. See `ActorRole` and `RolloutRole`."""

    rollout_engine: RolloutEngine
    host_copy: HostCopy

    def make_parts(self) -> None:
        super().make_parts()
        self.turns.sleep()
        self.rollout_engine = self.make_rollout_engine()
        if hasattr(self.rollout_engine, "on_lost"):
            self.rollout_engine.on_lost = end_process
        self.turns.add(ROLLOUT, wake=self.rollout_engine.wake, sleep=lambda: self.rollout_engine.sleep(2))

    def teardown(self) -> None:
        self.close_episodes()
        if "rollout_engine" in self.__dict__:
            self.rollout_engine.close()
        super().teardown()

    def make_rollout_engine(self) -> RolloutEngine:
        """Make the rollout engine, which serves nothing before the first `publish`."""
        return make_rollout_engine(self.run_settings, sleeps=True)

    def offer_weights(self) -> None:
        with self.turns.turn(TRAINING):
            self.host_copy = HostCopy(self.engine.named_tensors(lora=self.pushed))
            self.host_copy.take()

    @rpc
    def publish(self, version: int) -> None:
        """Let the rollout engine serve the weights of the last step, as ``version``.

        Raises:
            SourceRestarted: the last step has another version.
        """
        self.require(version)
        with self.turns.turn(ROLLOUT):
            self.host_copy.give(self.rollout_engine, version)

    @rpc
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """One sample per prompt. The engine's seed is derived from the call's seed and the rank."""
        with self.turns.turn(ROLLOUT):
            return self.rollout_engine.generate(prompts, engine_params(params, current_worker().rank))

    def sampling_engine(self) -> RolloutEngine:
        return self.rollout_engine

    @rpc
    def sample_in_turn(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        """The samples of each request, with the requests' own seeds."""
        with self.turns.turn(ROLLOUT):
            return sample_groups(self.rollout_engine, requests, params)


class ActorRolloutRef(ActorRollout):
    """An `ActorRollout` that also holds the reference policy. See `ReferenceRole`."""

    reference: FrozenPolicy

    def make_parts(self) -> None:
        super().make_parts()
        self.turns.sleep()
        self.reference = FrozenPolicy(self.make_reference(), self.run_settings.rollout.temperature)
        self.turns.add(REFERENCE, wake=self.reference.wake, sleep=self.reference.sleep)

    def make_reference(self) -> nn.Module:
        """The model of the reference, in float32, on this rank's device."""
        from transformers import AutoModelForCausalLM

        chosen = self.run_settings.reference.model or self.run_settings.model
        model: nn.Module = AutoModelForCausalLM.from_pretrained(chosen, dtype=torch.float32)
        return model.to(self.device).eval()

    @rpc
    def reference_log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs by the reference policy, ``[targets]`` each."""
        with self.turns.turn(REFERENCE):
            return self.reference.log_probs(packs)
