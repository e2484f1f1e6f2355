"""`ActorRollout` and `ActorRolloutRef`: one process trains the policy, samples with it, and holds the reference.

The parts take turns: the training engine is offloaded while the rollout engine is awake, and vice versa. Weights go
from one to the other through a copy in host memory, so that the two never need the device at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rlmesh import rpc
from rlmesh.rl.engines.rollout import RolloutEngine
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.host_copy import HostCopy
from rlmesh.rl.roles.reference import REFERENCE, FrozenPolicy, reference_model
from rlmesh.rl.roles.rollout import make_rollout_engine
from rlmesh.rl.roles.sampling import ROLLOUT, SamplingRole
from rlmesh.rl.roles.trained import TRAINING

__all__ = ["ActorRollout", "ActorRolloutRef"]


class ActorRollout(SamplingRole, ActorRole):
    """One rank of the policy in training, with a rollout engine of its own. See `ActorRole` and `RolloutRole`."""

    rollout_engine: RolloutEngine
    host_copy: HostCopy

    def make_parts(self) -> None:
        super().make_parts()
        self.turns.sleep()
        self.rollout_engine = self.make_rollout_engine()
        self.add_engine()

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

    def sampling_engine(self) -> RolloutEngine:
        return self.rollout_engine


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
        return reference_model(self.run_settings, self.device)

    @rpc
    def reference_log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of packs by the reference policy, ``[targets]`` each."""
        with self.turns.turn(REFERENCE):
            return self.reference.log_probs(packs)
