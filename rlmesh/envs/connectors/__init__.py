"""Connectors: steps between environments and the policy, such as normalising observations or stacking frames.

``config.env_runners(connectors=[FrameStack(4), ObservationNormalizer(), RewardClip()])`` applies them in this order.
"""

from __future__ import annotations

from rlmesh.envs.connectors.connector import Connector, ConnectorPipeline
from rlmesh.envs.connectors.frame_stack import FrameStack
from rlmesh.envs.connectors.moments import RunningMoments
from rlmesh.envs.connectors.normalizer import ObservationNormalizer
from rlmesh.envs.connectors.reward_clip import RewardClip

__all__ = ["Connector", "ConnectorPipeline", "FrameStack", "ObservationNormalizer", "RewardClip", "RunningMoments"]
