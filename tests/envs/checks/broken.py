"""Environments with one fault each, and sound ones beside them."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

LENGTH = 7


class Walk(gymnasium.Env[Any, Any]):
    """A sound environment: a walk of 7 steps from a random start."""

    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(-100, 100, (2,), np.float32)
        self.action_space: Any = spaces.Discrete(3)
        self.place, self.t = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place, self.t = float(self.np_random.normal()), 0
        return self.observe(), self.info()

    def step(self, action: Any) -> Any:
        self.place += float(action) - 1
        self.t += 1
        return self.observe(), self.reward(), self.t >= LENGTH, False, self.info()

    def observe(self) -> Any:
        return np.array([self.place, self.t], np.float32)

    def reward(self) -> Any:
        return -abs(self.place) - 1

    def info(self) -> dict[str, Any]:
        return {}


class Nested(Walk):
    """A sound environment with dict and tuple spaces, and arrays in its infos."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({
            "walk": spaces.Tuple((spaces.Box(-100, 100, (2,), np.float32), spaces.Discrete(LENGTH + 1))),
            "bits": spaces.MultiBinary(3), "word": spaces.Text(4),
        })  # fmt: skip
        self.action_space = spaces.Dict({"go": spaces.Discrete(3), "how": spaces.Box(0, 1, (2,), np.float32)})

    def step(self, action: Any) -> Any:
        return super().step(action["go"])

    def observe(self) -> Any:
        return {"walk": (super().observe(), self.t), "bits": np.array([1, 0, self.t % 2], np.int8), "word": "ab"}

    def info(self) -> dict[str, Any]:
        return {"map": {"seen": [np.array([self.place])]}}


class SameArray(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(2, np.float32)

    def observe(self) -> Any:
        self.array[:] = self.place, self.t
        return self.array


class SameArrayInDict(SameArray):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"deep": spaces.Dict({"walk": spaces.Box(-100, 100, (2,), np.float32)})})

    def observe(self) -> Any:
        return {"deep": {"walk": super().observe()}}


class SameArrayInTuple(SameArray):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Tuple((spaces.Discrete(9), spaces.Box(-100, 100, (2,), np.float32)))

    def observe(self) -> Any:
        return self.t, super().observe()


class SameArrayInInfo(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(1)

    def info(self) -> dict[str, Any]:
        self.seen[0] = self.place
        return {"debug": [{"seen": self.seen}]}


class SameInfo(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.same: dict[str, Any] = {}

    def info(self) -> dict[str, Any]:
        self.same["t"] = self.t
        return self.same


class Outside(Walk):
    def observe(self) -> Any:
        return np.array([self.place, 200 if self.t == 3 else 0], np.float32)


class OtherDtype(Walk):
    def observe(self) -> Any:
        return np.array([self.place, self.t])


class ResetsItself(Walk):
    def step(self, action: Any) -> Any:
        result = super().step(action)
        if result[2]:
            return self.reset()[0], *result[1:]
        return result


class BeginsAnew(Walk):
    """The same fault without a call of ``reset``."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if result[2]:
            self.place, self.t = float(self.np_random.normal()), 0
            return self.observe(), *result[1:]
        return result


class GlobalGenerator(Walk):
    def reward(self) -> Any:
        return random.random()


class OrderOfSets(Walk):
    def reward(self) -> Any:
        return float(sum(3**n * (ord(c) - 96) for n, c in enumerate({"a", "b", "c", "d", "e"})))


class CarriesOver(Walk):
    games = 0

    def reset(self, **options: Any) -> Any:
        self.games += 1
        return super().reset(**options)

    def reward(self) -> Any:
        return float(self.games)


class RepeatsActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        results = [self.env.step(action) for _ in range(4)]
        ended = [any(flags) for flags in list(zip(*results, strict=True))[2:4]]
        return results[-1][0], sum(float(result[1]) for result in results), *ended, results[-1][4]


class LivesOn(Walk):
    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self.t == LENGTH, truncated, info


class NoReward(Walk):
    def reward(self) -> Any:
        return None


class NanReward(Walk):
    def reward(self) -> Any:
        return np.float32("nan") if self.t == 5 else 1.0


class TextReward(Walk):
    def reward(self) -> Any:
        return "1.0"


class GrowingSpace(Walk):
    def reset(self, **options: Any) -> Any:
        self.action_space = spaces.Discrete(int(self.action_space.n) + 1)
        return super().reset(**options)


class OpensFiles(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.file = os.open("/dev/null", os.O_RDONLY)


class OpensFilesAtReset(Walk):
    def reset(self, **options: Any) -> Any:
        self.file = os.open("/dev/zero", os.O_RDONLY)
        return super().reset(**options)


class Hangs(Walk):
    def step(self, action: Any) -> Any:
        while self.t == 4:
            time.sleep(0.01)
        return super().step(action)


class Dies(Walk):
    def step(self, action: Any) -> Any:
        if self.t == 4:
            os.abort()
        return super().step(action)


class Raises(Walk):
    def step(self, action: Any) -> Any:
        if self.t == 4:
            raise IndexError("no such tile")
        return super().step(action)


class OldInterface(Walk):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class Walks(VectorEnv[Any, Any, Any]):
    """Three walks, stepped together; by default sound, in the mode SAME_STEP."""

    mode = AutoresetMode.SAME_STEP

    def __init__(self) -> None:
        self.num_envs = 3
        self.metadata = {"autoreset_mode": self.mode}
        self.walks = [Walk() for _ in range(3)]
        self.single_observation_space = self.walks[0].observation_space
        self.single_action_space = self.walks[0].action_space
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, 3)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, 3)

    def seeds(self, seed: int | None) -> list[int | None]:
        return [None if seed is None else seed + number for number in range(3)]

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        each = [walk.reset(seed=one)[0] for walk, one in zip(self.walks, self.seeds(seed), strict=True)]
        return np.stack(each), {}

    def step(self, actions: Any) -> Any:
        results = [walk.step(action) for walk, action in zip(self.walks, actions, strict=True)]
        observations = [result[0] for result in results]
        ended = np.array([result[2] for result in results])
        final = np.array([None] * 3, dtype=object)
        for number in np.flatnonzero(ended):
            final[number] = observations[number]
            observations[number] = self.walks[number].reset()[0]
        rewards = np.array([result[1] for result in results])
        return np.stack(observations), rewards, ended, np.zeros(3, bool), self.infos(final, observations, ended)

    def infos(self, final: Any, observations: Any, ended: Any) -> dict[str, Any]:
        return {"final_obs": final, "_final_obs": ended} if ended.any() else {}


class LosesLast(Walks):
    def infos(self, final: Any, observations: Any, ended: Any) -> dict[str, Any]:
        return {}


class FirstForLast(Walks):
    def infos(self, final: Any, observations: Any, ended: Any) -> dict[str, Any]:
        for number in np.flatnonzero(ended):
            final[number] = observations[number]
        return super().infos(final, observations, ended)


class SaysNextStep(Walks):
    mode = AutoresetMode.NEXT_STEP


class SaysNothing(Walks):
    mode = None  # type: ignore[assignment]


class EqualSeeds(Walks):
    def seeds(self, seed: int | None) -> list[int | None]:
        return [seed] * 3


def repeats_actions() -> Any:
    return RepeatsActions(Walk())


def nested() -> Any:
    return Nested()


def configured(config: dict[str, Any]) -> Any:
    return gymnasium.wrappers.TimeLimit(Walk(), config["limit"])


def poles(config: dict[str, Any]) -> Any:
    make = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
    return SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode(config["mode"]))


def shared_poles() -> Any:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, copy=False)


def no_environment(one: Any, two: Any) -> Any: ...


NUMBER = 3
