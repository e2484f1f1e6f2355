"""Environments whose steps return wrong kinds of values, and what the class of an environment gets."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import (
    PPO,
    EnvContext,
    EnvRunner,
    ModulePolicy,
    MultiAgentEnv,
    Policy,
    PPOConfig,
    make_multi_agent,
)
from rlmesh.envs.environments.registry import env_creator_of
from rlmesh.envs.runners.base import LongEpisodes
from rlmesh.envs.runners.creation import make_runner
from rlmesh.errors import UsageError

from .environments import Count


class Returns(Count):
    """Steps return what ``env_config["results"]`` makes of the right results."""

    count_made = 0

    def __init__(self, config: EnvContext) -> None:
        super().__init__()
        type(self).count_made += 1
        self.change = config["results"]

    def step(self, action: Any) -> Any:
        return self.change(*super().step(action))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (lambda o, r, te, tr, i: (o, r, "no", False, i), "terminated = 'no' (str): it is True or False"),
        (lambda o, r, te, tr, i: (o, r, None, False, i), "terminated = None (NoneType): it is True or False"),
        (lambda o, r, te, tr, i: (o, r, te, 0.5, i), "truncated = 0.5 (float): it is True or False"),
        (lambda o, r, te, tr, i: (o, "1", te, tr, i), "reward '1' (str): a reward is a number"),
        (lambda o, r, te, tr, i: (o, None, te, tr, i), "reward None (NoneType): a reward is a number"),
        (lambda o, r, te, tr, i: (o, np.array([1.0]), te, tr, i), "reward array([1.]) (ndarray): a reward is a number"),
        (lambda o, r, te, tr, i: (o, r, te, tr, None), "info None (NoneType): it is a dict"),
        (lambda o, r, te, tr, i: (o, r, te, i), "4 values; the five of Gymnasium are observation, reward, terminated"),
        (lambda o, r, te, tr, i: None, "None; the five of Gymnasium are observation"),
    ],
)  # fmt: skip
def test_a_step_of_wrong_values_is_refused_at_once(results: Any, message: str) -> None:
    Returns.count_made = 0
    runner = EnvRunner(Returns, ModulePolicy, env_config={"results": results})
    with pytest.raises(UsageError, match="step\\(\\) of Returns returned .*" + re.escape(message)) as caught:
        runner.sample(4)
    runner.stop()
    assert caught.value.__context__ is None and Returns.count_made == 1, "it is not made again to do the same"


class Begins(Count):
    """Resets return what ``env_config["results"]`` makes of the right results."""

    def __init__(self, config: EnvContext) -> None:
        super().__init__()
        self.change = config["results"]

    def reset(self, **options: Any) -> Any:
        return self.change(*super().reset(**options))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (lambda o, i: np.zeros(2, np.float32), "array([0., 0.], dtype=float32); the two of Gymnasium are observation"),
        (lambda o, i: (o, i, {}), "3 values; the two of Gymnasium are observation, info"),
        (lambda o, i: (o, o), "the info array("),
    ],
)
def test_a_reset_of_wrong_values_is_refused_at_once(results: Any, message: str) -> None:
    with pytest.raises(UsageError, match="reset\\(\\) of Begins returned " + re.escape(message)) as caught:
        EnvRunner(Begins, ModulePolicy, env_config={"results": results}).sample(4)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("flag", [np.bool_(False), 0, np.int8(0)])
def test_flags_and_rewards_of_numpy_are_taken(flag: Any) -> None:
    results = lambda o, r, te, tr, i: (o, np.array(2.5, np.float32), flag, flag, i)  # noqa: E731
    runner = EnvRunner(Returns, ModulePolicy, env_config={"results": results})
    assert set(runner.sample(4)["rewards"]) == {2.5}
    runner.stop()


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (gym.spaces.Discrete(7), -1), (gym.spaces.Discrete(7), np.int64(7)), (gym.spaces.Discrete(3, start=4), 3),
        (gym.spaces.MultiDiscrete([2, 3]), np.array([1, 3])),
    ],
)  # fmt: skip
def test_an_observation_that_is_no_category_is_refused(space: Any, observation: Any) -> None:
    class Outside(Count):
        observation_space = space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return observation, {}

    runner = EnvRunner(Outside, ModulePolicy)
    with pytest.raises(UsageError, match="is outside of the observation_space"):
        runner.sample(4)
    runner.stop()


class Sized(Count):
    """Has the signature of Gymnasium's tutorial."""

    def __init__(self, render_mode: str | None = None, size: int = 5) -> None:
        super().__init__()
        self.render_mode, self.size = render_mode, size


class ByDefault(Count):
    def __init__(self, env_config: Any = None) -> None:
        super().__init__()
        self.given = env_config


class Named(Count):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.given = c


class Plain(Count):
    def __init__(self) -> None:
        super().__init__()


def test_a_class_gets_its_configuration_or_keywords() -> None:
    sized = env_creator_of(Sized)
    assert (sized(EnvContext()).size, sized(EnvContext()).render_mode) == (5, None)
    assert sized(EnvContext({"size": 7})).size == 7
    with pytest.raises(UsageError, match=r"env_config has 'siz', which is no argument of Sized. Did you mean 'size'"):
        sized(EnvContext({"siz": 7}))
    for cls in (ByDefault, Named):
        context = EnvContext({"size": 7}, worker_index=3)
        assert env_creator_of(cls)(context).given is context
    assert isinstance(env_creator_of(Plain)(EnvContext()), Plain)


class Pair(MultiAgentEnv):
    possible_agents = ("a", "b")
    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, config: EnvContext) -> None:
        self.rewards, self.flags = config.get("rewards", {}), config.get("flags", {"__all__": False})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return {"a": 0, "b": 1}, {}

    def step(self, actions: Any) -> Any:
        return {"a": 0, "b": 1}, self.rewards, self.flags, {}, {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rewards": {"aa": 1.0}}, "returned a reward for 'aa', which is none of its agents. Did you mean 'a'"),
        ({"rewards": {"a": "1"}}, r"returned the reward '1' \(str\): a reward is a number"),
        ({"rewards": {"a": None}}, r"returned the reward None \(NoneType\): a reward is a number"),
        ({"rewards": 1.0}, r"returned rewards = 1.0 \(float\): they are a dict by agent"),
        ({"flags": {"__all__": "no"}}, r"terminateds\['__all__'\] = 'no' \(str\): it is True or False"),
    ],
)  # fmt: skip
def test_steps_of_several_agents_with_wrong_values_are_refused(config: Any, message: str) -> None:
    settings = PPOConfig().environment(Pair, env_config=config).training(train_batch_size=8, minibatch_size=8)
    settings = settings.multi_agent(policies=["p"], policy_mapping_fn=lambda *_: "p")
    with settings.build() as algorithm, pytest.raises(UsageError, match=message):
        algorithm.train()


class Endless(gym.Env[Any, Any]):
    """Ends its episode after so many steps, or never."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.length = (config or {}).get("length")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return np.zeros(1, np.float32), 1.0, self.at == self.length, False, {}


@pytest.mark.parametrize("agents", [False, True])
def test_whole_episodes_that_do_not_end_are_told(
    agents: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LongEpisodes, "LONG", 300)
    made: Any = make_runner(make_multi_agent(Endless) if agents else Endless, ModulePolicy, env_config={"length": 250})
    made.sample(num_episodes=3)
    assert not caplog.text
    made = make_runner(make_multi_agent(Endless) if agents else Endless, ModulePolicy, env_config={"length": 900})
    made.sample(num_episodes=2)
    assert caplog.text.count("no environment has ended one for") == 1
    assert "give the environment a time limit" in caplog.text


@pytest.mark.parametrize("composed", [False, True])
def test_whole_numbers_that_do_not_fit_the_type_of_their_space_are_refused(composed: bool) -> None:
    class Small(Endless):
        inner = gym.spaces.Box(-100, 100, (2,), np.int8)
        observation_space: Any = gym.spaces.Dict({"a": inner}) if composed else inner
        value = 100

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset()
            row = np.array([self.value, -3])  # int64
            return {"a": row} if composed else row, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.reset()[0], 1.0, False, False, {}

    assert (EnvRunner(lambda c: Small(), ModulePolicy).sample(3)["obs"] == [100, -3]).all()
    Small.value = 300
    with pytest.raises(UsageError, match="numbers that do not fit int8"):
        EnvRunner(lambda c: Small(), ModulePolicy).sample(3)


def test_steps_before_an_error_are_counted() -> None:
    class Fails(Endless):
        steps = 0

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            Fails.steps += 1
            observation, _, *rest = super().step(action)
            return observation, float("nan") if Fails.steps == 70 else 1.0, *rest

    config = PPOConfig().environment(Fails, env_config={"length": 10}).env_runners(num_envs=1)
    config.training(train_batch_size=20, minibatch_size=10).reporting(min_env_steps_per_iteration=100)
    with config.build() as algorithm:
        with pytest.raises(FloatingPointError):
            algorithm.train()
        result = algorithm.train()
    assert result["num_env_steps_sampled_lifetime"] == 160 == result["info"]["num_env_steps_trained"]
    assert result["env_runners"]["num_episodes_lifetime"] == 16


def test_a_setup_that_fails_leaves_no_runners() -> None:
    stopped: list[Any] = []

    class Own(PPO):
        def setup(self, config: Any) -> None:
            super().setup(config)
            stop = self.env_runner_group.stop
            self.env_runner_group.stop = lambda: stopped.append(stop())  # type: ignore[method-assign]
            raise RuntimeError("of the subclass")

    with pytest.raises(RuntimeError, match="of the subclass"):
        Own({"env": "CartPole-v1"})
    assert len(stopped) == 1


class _Wide(gym.vector.VectorEnv[Any, Any, Any]):
    """Two environments that return int64 where their space has int8; an episode has two steps."""

    single_observation_space = observation_space = gym.spaces.Box(-100, 100, (1,), np.int8)
    single_action_space = action_space = gym.spaces.Discrete(2)
    num_envs = 2

    def __init__(self, mode: Any, values: tuple[int, int]) -> None:
        self.metadata, self.values, self.at = {"autoreset_mode": mode}, values, 0

    def _observed(self, value: int) -> np.ndarray:
        return np.full((2, 1), value)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._observed(self.values[0]), {}

    def step(self, actions: Any) -> Any:
        self.at += 1
        done = np.full(2, self.at % 2 == 0)
        infos = {"final_obs": self._observed(self.values[1])} if done[0] else {}
        return self._observed(self.values[0]), np.ones(2), np.zeros(2, bool), done, infos


@pytest.mark.parametrize("values", [(300, 1), (-200, 1), (1, 300)])
def test_whole_numbers_of_vectors_that_do_not_fit_are_refused_too(values: tuple[int, int]) -> None:
    same_step = gym.vector.AutoresetMode.SAME_STEP
    good = EnvRunner(lambda context: _Wide(same_step, (7, 99)), ModulePolicy).sample(8)
    assert set(good["new_obs"].ravel()) == {7, 99}
    with pytest.raises(UsageError, match="numbers that do not fit int8"):
        EnvRunner(lambda context: _Wide(same_step, values), ModulePolicy).sample(8)


@pytest.mark.parametrize(("kind", "action"), [(np.float64, 0.9), (np.int64, 257)])
def test_actions_that_do_not_fit_the_type_of_their_space_are_refused(kind: Any, action: Any) -> None:
    """They became another action: 0.9 became 0, and 257 became 1."""

    class Binary(Endless):
        action_space: Any = gym.spaces.MultiBinary(1)

    class Chooses(Policy):
        def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
            return np.full((len(obs_batch), 1), self.config["action"], kind), None, {}

    def runner(value: Any) -> EnvRunner:
        return EnvRunner(lambda context: Binary(), Chooses, policy_config={"action": value})

    assert (runner(1).sample(3)["actions"] == 1).all()
    with pytest.raises(UsageError, match=r"Chooses chose actions of .* that do not fit int8"):
        runner(action).sample(3)
