"""Algorithms: they compute the weights of the loss from the episodes of a batch, and have no state.

=========================  ======================================================================
`GRPO`                     responses to one prompt compared with each other; all of its relatives
`PPO`                      a critic and GAE
`ReinforcePlusPlus`        returns whitened over the batch, no critic
`SFT`                      cross-entropy of given responses
`DPO`                      preferences between pairs of given responses
`RewardModelling`          a reward model from such pairs
`BehaviourCloning`         cross-entropy of one's own good responses
`OnPolicyDistillation`     the divergence from a teacher on one's own samples
=========================  ======================================================================
"""

from __future__ import annotations

from rlmesh.rl.algorithms.grpo import GRPO as GRPO
from rlmesh.rl.algorithms.pairs import DPO as DPO
from rlmesh.rl.algorithms.pairs import RewardModelling as RewardModelling
from rlmesh.rl.algorithms.ppo import PPO as PPO
from rlmesh.rl.algorithms.ppo import ReinforcePlusPlus as ReinforcePlusPlus
from rlmesh.rl.algorithms.protocol import Algorithm as Algorithm
from rlmesh.rl.algorithms.protocol import Evaluated as Evaluated
from rlmesh.rl.algorithms.protocol import Normalisers as Normalisers
from rlmesh.rl.algorithms.protocol import TokenWeights as TokenWeights
from rlmesh.rl.algorithms.supervised import SFT as SFT
from rlmesh.rl.algorithms.supervised import BehaviourCloning as BehaviourCloning
from rlmesh.rl.algorithms.supervised import OnPolicyDistillation as OnPolicyDistillation
