"""Environments whose numbers are known by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np


class Count(gym.Env[np.ndarray, Any]):
    """Observes ``[episode, step]``; the reward is the step's number. Episodes have a given length each.

    Args:
        lengths: lengths of the episodes, repeated.
        truncated: which of them end by truncation.
        fails: ``(episode, step)`` at which `step` raises, once.
        same_array: reuse one array for all observations.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    made: ClassVar[list[int | None]] = []

    def __init__(
        self,
        lengths: tuple[int, ...] = (3, 5, 2),
        truncated: tuple[bool, ...] = (False, True, False),
        fails: tuple[int, int] | None = None,
        same_array: bool = False,
    ) -> None:
        self.lengths, self.truncated, self.fails, self.same = lengths, truncated, fails, same_array
        self.episode, self.at = -1, 0
        self.array = np.zeros(2, np.float32)
        self.info = {"at": np.zeros(1)}

    def observe(self) -> np.ndarray:
        array = self.array if self.same else np.zeros(2, np.float32)
        array[:] = self.episode, self.at
        return array

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        Count.made.append(seed)
        self.episode, self.at = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        if self.fails == (self.episode, self.at):
            raise RuntimeError("the simulator crashed")
        self.at += 1
        which = self.episode % len(self.lengths)
        over = self.at == self.lengths[which]
        truncated = over and self.truncated[which]
        self.info["at"][:] = self.at
        return self.observe(), float(self.at), over and not truncated, truncated, self.info


class Target(gym.Env[np.ndarray, np.ndarray]):
    """One step: the reward is minus the squared distance of the action to the observation."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.at, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.at, -float(((action - self.at) ** 2).sum()), True, False, {}


class Copy(gym.Env[Any, np.ndarray]):
    """Five steps: repeat both parts of a composed observation."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Discrete(3), "b": gym.spaces.Discrete(2, start=1)})
    action_space = gym.spaces.MultiDiscrete([3, 2])

    def observe(self) -> dict[str, Any]:
        self.now = (int(self.np_random.integers(3)), int(self.np_random.integers(2)) + 1)
        return {"a": self.now[0], "b": self.now[1]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 5
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action[0] == self.now[0]) + float(action[1] == self.now[1] - 1)
        self.left -= 1
        return self.observe(), reward, self.left == 0, False, {}


class Frames(gym.Env[np.ndarray, Any]):
    """Two steps on images of 36 × 36; the brighter half says which action is right."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 2), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def observe(self) -> np.ndarray:
        self.side = int(self.np_random.integers(2))
        image = np.zeros((36, 36, 2), np.uint8)
        image[18 * self.side : 18 * (self.side + 1)] = 200
        return image

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 2
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.side)
        self.left -= 1
        return self.observe(), reward, self.left == 0, False, {}
