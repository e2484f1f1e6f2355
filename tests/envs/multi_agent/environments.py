"""Environments of several agents whose numbers are known by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rlmesh.envs import MultiAgentEnv, Policy

BOX = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
TWO = gym.spaces.Discrete(2)


@dataclass
class Event:
    """What a step returns: which agents observe, their rewards, and who ends how."""

    seen: tuple[str, ...] = ()
    rewards: dict[str, float] = field(default_factory=dict)
    terminated: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()


class Scripted(MultiAgentEnv):
    """Plays given episodes, one after the other, again and again; observes ``[episode, number of the event]``."""

    observation_space = BOX
    action_space = TWO
    possible_agents: Sequence[str] = ("a", "b", "c")

    def __init__(self, episodes: list[list[Event]], fails: tuple[int, int] | None = None) -> None:
        self.episodes, self.fails, self.episode, self.at = episodes, fails, -1, 0
        self.asked: list[tuple[str, ...]] = []

    def _observe(self, agents: tuple[str, ...]) -> dict[str, np.ndarray]:
        return {agent: np.array([self.episode, self.at], np.float32) for agent in agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self._observe(self.script[0].seen), {}

    @property
    def script(self) -> list[Event]:
        return self.episodes[self.episode % len(self.episodes)]

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        if self.fails == (self.episode, self.at):
            raise RuntimeError("the simulator crashed")
        self.asked.append(tuple(actions))
        self.at += 1
        event = self.script[self.at]
        return (
            self._observe(event.seen), event.rewards, dict.fromkeys(event.terminated, True) | {
                "__all__": "__all__" in event.terminated}, dict.fromkeys(event.truncated, True), {},
        )  # fmt: skip


class Convoy(MultiAgentEnv):
    """Five steps: each agent sees a bit, and both are paid if both name theirs. The second agent's is inverted.

    Attributes:
        team: reward of both if both are right.
    """

    possible_agents = ("first", "second")
    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def _observe(self) -> dict[str, int]:
        self.bits = {agent: int(self.np_random.integers(2)) for agent in self.possible_agents}
        return dict(self.bits)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.left = 5
        return self._observe(), {}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        right = actions["first"] == self.bits["first"] and actions["second"] == 1 - self.bits["second"]
        self.left -= 1
        rewards = dict.fromkeys(self.possible_agents, float(right))
        return self._observe(), rewards, {"__all__": self.left == 0}, {"__all__": False}, {}


class Shift(MultiAgentEnv):
    """Workers come and go: each stays for three steps, and is paid for naming its kind, which it observes.

    A new worker comes every second step; after 20 steps the episode is truncated.
    """

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(3)
    possible_agents = ("worker_0",)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.time, self.came = 0, 0
        self.since: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self._come()
        return dict(self.kinds), {}

    def _come(self) -> None:
        name = f"worker_{self.came}"
        self.since[name], self.kinds[name] = 0, int(self.np_random.integers(3))
        self.came += 1

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        self.time += 1
        rewards = {name: float(action == self.kinds[name]) for name, action in actions.items()}
        for name in actions:
            self.since[name] += 1
        gone = {name: True for name in actions if self.since[name] == 3}
        observations = dict(self.kinds)
        for name in gone:
            del self.kinds[name], self.since[name]
        if self.time % 2 == 0:
            self._come()
        observations |= self.kinds
        return observations, rewards, {**gone, "__all__": False}, {"__all__": self.time >= 20}, {}


class Always(Policy):
    """Takes one action, which its config has."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return np.full(len(obs_batch), self.config.get("action", 0)), None, {}


class Anything(Policy):
    """Takes any action with equal probability."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return self.rng.integers(self.action_space.n, size=len(obs_batch)), None, {}


class Turns(MultiAgentEnv):
    """Each agent gets a cue, +1 or -1, at its first turn, and has to name it at its last one: +1, otherwise -1.

    The agents take turns in a random order, ``wait + 1`` turns each. At the last turn, all agents observe the same.
    """

    possible_agents = ("left", "right")
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    wait = 2

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.cues = {agent: 2 * int(self.np_random.integers(2)) - 1 for agent in self.possible_agents}
        self.taken = dict.fromkeys(self.possible_agents, 0)
        self.order = [str(agent) for agent in self.np_random.permutation(self.possible_agents * (self.wait + 1))]
        return self._observe(), {}

    def _observe(self) -> dict[str, np.ndarray]:
        if not self.order:
            return {}
        agent = self.order[0]
        at = self.taken[agent]
        return {agent: np.array([self.cues[agent] if at == 0 else 0, at == self.wait], np.float32)}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        agent = self.order.pop(0)
        rewards = {}
        if self.taken[agent] == self.wait:
            rewards[agent] = float((2 * actions[agent] - 1) * self.cues[agent])
        self.taken[agent] += 1
        return self._observe(), rewards, {"__all__": not self.order}, {"__all__": False}, {}


class Fragile(Scripted):
    """`Scripted` that raises an error which no pickle brings back, and whose second environment never breaks."""

    class Cracked(Exception):
        def __init__(self, one: Any, two: Any) -> None:
            super().__init__("cracked")

    def step(self, actions: Any) -> Any:
        try:
            return super().step(actions)
        except RuntimeError:
            raise Fragile.Cracked(1, 2) from None


class Waiting(Convoy):
    """A step returns when the other environment has begun its step too, or after 20 seconds."""

    def __init__(self, config: Any) -> None:
        self.folder, self.number, self.steps = Path(config["folder"]), config.vector_index, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        (self.folder / f"{self.number}-{self.steps}").touch()
        other, until = self.folder / f"{1 - self.number}-{self.steps}", time.monotonic() + 20
        while not other.exists():
            if time.monotonic() > until:
                raise AssertionError("the other environment has not begun its step")
            time.sleep(0.001)
        return super().step(actions)
