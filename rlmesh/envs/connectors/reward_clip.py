"""Clips the rewards that a policy learns from."""

from __future__ import annotations

import numpy as np

from rlmesh.envs.connectors.connector import Connector
from rlmesh.errors import UsageError

__all__ = ["RewardClip"]


class RewardClip(Connector):
    """Rewards from ``low`` to ``high``. The returns of episodes that results show are those of the environment.

    Args:
        low, high: the interval; -1 to 1 is usual for Atari games (Mnih et al. 2015).
    """

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        if not low < high:
            raise UsageError(f"RewardClip: low must be below high, not {low} and {high}")
        self.low, self.high = float(low), float(high)

    def clip_rewards(self, rewards: np.ndarray) -> np.ndarray:
        clipped: np.ndarray = np.clip(rewards, self.low, self.high)
        return clipped
