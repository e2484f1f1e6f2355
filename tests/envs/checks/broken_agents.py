"""Environments of two agents with one fault each, in four forms, and sound ones beside them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from rlmesh.envs import MultiAgentEnv

LENGTH = 7
AGENTS = ("a", "b")


class Match:
    """The sound rules: each agent walks 7 steps from a random start.

    Attributes:
        calls_reset: the environment calls its own ``reset`` at the end.
        truncates: the end is a truncation.
        leave_out: the last observations are missing.
    """

    calls_reset = truncates = leave_out = False

    def __init__(self) -> None:
        self.spaces: Any = {agent: spaces.Box(-100, 100, (2,), np.float32) for agent in AGENTS}
        self.actions: Any = {agent: spaces.Discrete(3) for agent in AGENTS}
        self.random: Any = None

    def begin(self, seed: int | None) -> None:
        if seed is not None or self.random is None:
            self.random = np.random.default_rng(seed)
        self.draw()

    def draw(self) -> None:
        self.places = {agent: float(self.random.normal()) for agent in AGENTS}
        self.times = dict.fromkeys(AGENTS, 0)

    def act(self, agent: str, action: Any) -> None:
        self.places[agent] += float(action) - 1
        self.times[agent] += 1

    def over(self) -> bool:
        return all(time >= LENGTH for time in self.times.values())

    def observe(self, agent: str) -> Any:
        return np.array([self.places[agent], self.times[agent]], np.float32)

    def reward(self, agent: str) -> Any:
        return -abs(self.places[agent]) - 1

    def info(self, agent: str) -> dict[str, Any]:
        return {}


class Masked(Match):
    """A sound game whose first action is illegal, and ends the process that takes it."""

    def __init__(self) -> None:
        super().__init__()
        box = spaces.Box(-100, 100, (2,), np.float32)
        self.spaces = {
            agent: spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(3)}) for agent in AGENTS
        }  # fmt: skip

    def act(self, agent: str, action: Any) -> None:
        assert action != 0
        super().act(agent, action)

    def observe(self, agent: str) -> Any:
        return {"observation": super().observe(agent), "action_mask": np.array([0, 1, 1], np.int8)}


class SameArray(Match):
    def __init__(self) -> None:
        super().__init__()
        self.arrays = {agent: np.zeros(2, np.float32) for agent in AGENTS}

    def observe(self, agent: str) -> Any:
        self.arrays[agent][:] = self.places[agent], self.times[agent]
        return self.arrays[agent]


class SameArrayInDict(SameArray):
    def __init__(self) -> None:
        super().__init__()
        self.spaces = {agent: spaces.Dict({"deep": space}) for agent, space in self.spaces.items()}

    def observe(self, agent: str) -> Any:
        return {"deep": super().observe(agent)}


class SameArrayInInfo(Match):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(1)

    def info(self, agent: str) -> dict[str, Any]:
        self.seen[0] += 1
        return {"debug": [{"seen": self.seen}]}


class Outside(Match):
    def observe(self, agent: str) -> Any:
        return np.array([self.places[agent], 200 if agent == "b" and self.times[agent] == 3 else 0], np.float32)


class OtherDtype(Match):
    def observe(self, agent: str) -> Any:
        return np.array([self.places[agent], 0]) if agent == "b" else super().observe(agent)


class ResetsItself(Match):
    calls_reset = True


class BeginsAnew(Match):
    ends = False

    def act(self, agent: str, action: Any) -> None:
        super().act(agent, action)
        self.ends = super().over()
        if self.ends:
            self.draw()

    def over(self) -> bool:
        return self.ends


class GlobalGenerator(Match):
    def reward(self, agent: str) -> Any:
        return random.random()


class OrderOfSets(Match):
    def reward(self, agent: str) -> Any:
        return float(sum(3**n * (ord(c) - 96) for n, c in enumerate({"a", "b", "c", "d", "e"})))


class CarriesOver(Match):
    games = 0

    def begin(self, seed: int | None) -> None:
        self.games += 1
        super().begin(seed)

    def reward(self, agent: str) -> Any:
        return float(self.games)


class LivesOn(Match):
    def over(self) -> bool:
        return max(self.times.values()) == LENGTH == min(self.times.values())


class NoReward(Match):
    def reward(self, agent: str) -> Any:
        return None if agent == "b" else 1.0


class NanReward(Match):
    def reward(self, agent: str) -> Any:
        return np.float32("nan") if self.times[agent] == 5 else 1.0


class TextReward(Match):
    def reward(self, agent: str) -> Any:
        return "1.0"


class GrowingSpace(Match):
    def begin(self, seed: int | None) -> None:
        super().begin(seed)
        self.actions = {**self.actions, "b": spaces.Discrete(int(self.actions["b"].n) + 1)}


class NoSpace(Match):
    def __init__(self) -> None:
        super().__init__()
        self.actions = {**self.actions, "b": 3}


class ChangesActions(Match):
    def __init__(self) -> None:
        super().__init__()
        self.actions = {agent: spaces.Box(0, 2, (1,), np.float32) for agent in AGENTS}

    def act(self, agent: str, action: Any) -> None:
        super().act(agent, action[0])
        action *= 2


class NoLast(Match):
    truncates = leave_out = True


class OpensFiles(Match):
    def __init__(self) -> None:
        super().__init__()
        self.file = os.open("/dev/null", os.O_RDONLY)


class OpensFilesAtReset(Match):
    def begin(self, seed: int | None) -> None:
        super().begin(seed)
        self.file = os.open("/dev/zero", os.O_RDONLY)


class Hangs(Match):
    def act(self, agent: str, action: Any) -> None:
        while self.times[agent] == 4:
            time.sleep(0.01)
        super().act(agent, action)


class Raises(Match):
    def act(self, agent: str, action: Any) -> None:
        if self.times[agent] == 4:
            raise IndexError("no such tile")
        super().act(agent, action)


class Own(MultiAgentEnv):
    """Both agents act at once."""

    possible_agents = AGENTS

    def __init__(self, rules: type[Match]) -> None:
        self.match = rules()
        self.observation_spaces = self.match.spaces

    def get_action_space(self, agent_id: Any) -> Any:
        return self.match.actions[agent_id]

    def acting(self) -> tuple[str, ...]:
        return AGENTS

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.match.begin(seed)
        agents = self.acting()
        return {agent: self.match.observe(agent) for agent in agents}, {a: self.match.info(a) for a in agents}

    def step(self, actions: Mapping[str, Any]) -> Any:
        match = self.match
        for agent, action in actions.items():
            match.act(agent, action)
        over = match.over()
        agents = AGENTS if over else self.acting()
        observations = {} if over and match.leave_out else {agent: match.observe(agent) for agent in agents}
        if over and match.calls_reset:
            self.reset()
        ends = ({"__all__": over and not match.truncates}, {"__all__": over and match.truncates})
        return observations, {a: match.reward(a) for a in actions}, *ends, {a: match.info(a) for a in agents}


class OwnTurns(Own):
    """The agents act in turns."""

    def acting(self) -> tuple[str, ...]:
        return (min(AGENTS, key=lambda agent: (self.match.times[agent], agent)),)


class OldInterface(Own):
    def step(self, actions: Mapping[str, Any]) -> Any:
        observations, rewards, terminateds, _, infos = super().step(actions)
        return observations, rewards, terminateds, infos


class NoAll(Own):
    def step(self, actions: Mapping[str, Any]) -> Any:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        return observations, rewards, dict.fromkeys(AGENTS, terminateds["__all__"]), truncateds, infos


class NoDict(Own):
    def step(self, actions: Mapping[str, Any]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, sum(rewards.values()), *rest


class Returns(Own):
    """An agent that is done in its third step comes back in the fifth."""

    def step(self, actions: Mapping[str, Any]) -> Any:
        observations, rewards, terminateds, *rest = super().step(actions)
        time = self.match.times["a"]
        gone = {"b": True} if time == 3 else {}
        if time == 4:
            observations = {"a": observations["a"]}
        self.match.times["b"] = time
        return observations, rewards, {**terminateds, **gone}, *rest


class NumberAsFlag(Own):
    def step(self, actions: Mapping[str, Any]) -> Any:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        return observations, rewards, {**terminateds, "b": 0}, truncateds, infos


FORMS: dict[str, Callable[[type[Match]], Any]] = {"own": Own, "turns": OwnTurns}

try:
    import pettingzoo
except ImportError:
    pass
else:

    class Parallel(pettingzoo.ParallelEnv):  # type: ignore[misc]
        """Both agents act at once, in the form of PettingZoo."""

        metadata = {"name": "match"}  # noqa: RUF012
        possible_agents = AGENTS

        def __init__(self, rules: type[Match]) -> None:
            self.match = rules()

        def observation_space(self, agent: str) -> Any:
            return self.match.spaces[agent]

        def action_space(self, agent: str) -> Any:
            return self.match.actions[agent]

        def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            self.agents = list(AGENTS)
            self.match.begin(seed)
            return {a: self.match.observe(a) for a in AGENTS}, {a: self.match.info(a) for a in AGENTS}

        def step(self, actions: Any) -> Any:
            match = self.match
            for agent in self.agents:
                match.act(agent, actions[agent])
            over = match.over()
            observations = {} if over and match.leave_out else {a: match.observe(a) for a in AGENTS}
            rewards, infos = {a: match.reward(a) for a in AGENTS}, {a: match.info(a) for a in AGENTS}
            if over:
                if match.calls_reset:
                    self.reset()
                self.agents = []
            ends = [
                dict.fromkeys(AGENTS, over and not match.truncates),
                dict.fromkeys(AGENTS, over and match.truncates),
            ]
            return observations, rewards, *ends, infos

    class InTurns(pettingzoo.AECEnv):  # type: ignore[misc]
        """The agents act in turns, in the form of PettingZoo."""

        metadata = {"name": "match"}  # noqa: RUF012
        possible_agents = AGENTS

        def __init__(self, rules: type[Match]) -> None:
            super().__init__()
            self.match = rules()

        def observation_space(self, agent: str) -> Any:
            return self.match.spaces[agent]

        def action_space(self, agent: str) -> Any:
            return self.match.actions[agent]

        def observe(self, agent: str) -> Any:
            return self.match.observe(agent)

        def reset(self, seed: int | None = None, options: Any = None) -> None:
            self.match.begin(seed)
            self.agents, self.agent_selection = list(AGENTS), AGENTS[0]
            self.rewards = dict.fromkeys(AGENTS, 0.0)
            self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
            self.terminations, self.truncations = dict.fromkeys(AGENTS, False), dict.fromkeys(AGENTS, False)
            self.infos = {agent: self.match.info(agent) for agent in AGENTS}

        def step(self, action: Any) -> None:
            agent = self.agent_selection
            if self.terminations[agent] or self.truncations[agent]:
                self._was_dead_step(action)
                return
            self._cumulative_rewards[agent] = 0.0
            self.match.act(agent, action)
            over = self.match.over()
            if over and self.match.calls_reset:
                self.reset()
            self.rewards = {other: self.match.reward(agent) if other == agent else 0.0 for other in AGENTS}
            self.terminations = dict.fromkeys(AGENTS, over and not self.match.truncates)
            self.truncations = dict.fromkeys(AGENTS, over and self.match.truncates)
            self.infos = {each: self.match.info(each) for each in AGENTS}
            self.agent_selection = AGENTS[1 - AGENTS.index(agent)]
            self._accumulate_rewards()

    FORMS |= {"parallel": Parallel, "AEC": InTurns}


def __getattr__(name: str) -> Any:
    """The creator of ``FORM_RULES``, such as ``own_SameArray``."""
    form, _, rules = name.partition("_")
    if form in FORMS and rules in globals():
        return partial(FORMS[form], globals()[rules])
    raise AttributeError(name)
