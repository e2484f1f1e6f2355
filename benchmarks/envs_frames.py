"""The environment with frames of benchmarks/envs.py and envs_compare.py."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Frames(gym.Env[np.ndarray, Any]):
    """A trivial environment with frames of 84 × 84 × 4 bytes: a step increments one number."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, _config: Any = None) -> None:
        self.frame, self.at = np.zeros((84, 84, 4), np.uint8), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.at = 0
        return self.frame, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.frame = np.full((84, 84, 4), self.at & 255, np.uint8)  # a new array, as a renderer makes one
        return self.frame, 1.0, self.at == 1000, False, {}
