"""The worker classes of verl's documentation, as classes of rlmesh's roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.reward import RewardRole

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "NVMegatronRayWorkerGroup", "RayWorkerGroup", "RewardModelWorker"]


class ActorRolloutRefWorker:
    """Policy, rollout engine and reference, or some of these: the role that the class is mapped to decides.

    To change one, write a subclass of its class in `rlmesh.rl.roles`, and put it into ``parts``::

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
    """The argument ``ray_worker_group_cls`` of `RayPPOTrainer`. It changes nothing: every group of members is a
    `rlmesh.RoleGroup`."""


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """Stands for training with Megatron-LM, for which there is no engine yet: `RayPPOTrainer` refuses it."""
