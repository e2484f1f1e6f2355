"""The names of verl's PPO example, for programs that use them.

::

    from rlmesh.rl.verl import (
        ActorRolloutRefWorker, CriticWorker, RayPPOTrainer, RayWorkerGroup, ResourcePoolManager, RewardManager, Role,
    )

docs/seeds.md lists the names and what differs. New programs are shorter with `rlmesh.rl.trainers.run.Run`.
"""

from __future__ import annotations

from rlmesh import ResourcePoolManager as ResourcePoolManager
from rlmesh.rl.data import RLHFDataset as RLHFDataset
from rlmesh.rl.rewards import gsm8k as gsm8k
from rlmesh.rl.rewards import math as math
from rlmesh.rl.rewards.manager import RewardManager as RewardManager
from rlmesh.rl.rewards.manager import _select_rm_score_fn as _select_rm_score_fn
from rlmesh.rl.verl.role import Role as Role
from rlmesh.rl.verl.trainer import RayPPOTrainer as RayPPOTrainer
from rlmesh.rl.verl.workers import ActorRolloutRefWorker as ActorRolloutRefWorker
from rlmesh.rl.verl.workers import CriticWorker as CriticWorker
from rlmesh.rl.verl.workers import NVMegatronRayWorkerGroup as NVMegatronRayWorkerGroup
from rlmesh.rl.verl.workers import RayWorkerGroup as RayWorkerGroup
from rlmesh.rl.verl.workers import RewardModelWorker as RewardModelWorker
