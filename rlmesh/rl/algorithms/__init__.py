"""Algorithms: functions without state from the episodes of a batch to the weights of the loss.

=========================  ======================================================================
`GRPO`                     responses to one prompt compared with each other; all of its relatives
`PPO`                      a critic and GAE
`ReinforcePlusPlus`        returns whitened over the batch, no critic
`SFT`                      cross-entropy of given responses
`BehaviourCloning`         cross-entropy of one's own good responses
`OnPolicyDistillation`     the divergence from a teacher on one's own samples
=========================  ======================================================================
"""

from __future__ import annotations

from rlmesh.rl.algorithms.grpo import GRPO
from rlmesh.rl.algorithms.ppo import PPO, ReinforcePlusPlus
from rlmesh.rl.algorithms.protocol import Algorithm, Evaluated, Normalisers, TokenWeights
from rlmesh.rl.algorithms.supervised import SFT, BehaviourCloning, OnPolicyDistillation

__all__ = [
    "GRPO",
    "PPO",
    "SFT",
    "Algorithm",
    "BehaviourCloning",
    "Evaluated",
    "Normalisers",
    "OnPolicyDistillation",
    "ReinforcePlusPlus",
    "TokenWeights",
]
