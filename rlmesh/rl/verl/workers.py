"""The worker classes of verl's documentation, as classes of rlmesh's roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.reward import RewardRole

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "NVMegatronRayWorkerGroup", "RayWorkerGroup", "RewardModelWorker"]


class ActorRolloutRefWorker:
    """Policy, rollout engine and reference, or some of them: the role that the class is mapped to decides.

    To change one, inherit from its class in `rlmesh.rl.roles` and name that in ``parts``::

        class MyWorker(ActorRolloutRefWorker):
            parts = {**ActorRolloutRefWorker.parts, "ActorRollout": MyActorRollout}
    """

    parts: ClassVar[Mapping[str, Any]] = {
        "Actor": "rlmesh.rl.roles.actor.ActorRole",
        "Rollout": "rlmesh.rl.roles.rollout.RolloutRole",
        "ActorRollout": "rlmesh.rl.roles.fused.ActorRollout",
        "ActorRolloutRef": "rlmesh.rl.roles.fused.ActorRolloutRef",
        "RefPolicy": "rlmesh.rl.roles.reference.ReferenceRole",
    }
    """The class, or its dotted name, for each role."""


class CriticWorker(CriticRole):
    """The value function in training."""


class RewardModelWorker(RewardRole):
    """A model that scores responses: any that ``AutoModelForSequenceClassification`` loads."""


class RayWorkerGroup:
    """The members of a role. Here every group is a `rlmesh.RoleGroup`: the name selects it, and nothing else."""


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """The members of a role that trains by Megatron-LM, for which there is no engine yet: `RayPPOTrainer` says so."""
