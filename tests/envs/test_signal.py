"""Runs that have nothing to learn from: one warning, with numbers, in the log and in the results."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import Algorithm, APPOConfig, BCConfig, DQNConfig, PGConfig, PPOConfig, SACConfig
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.batches.signal import LEAST_BATCHES, LEAST_STEPS, SignalWatch

NOTHING = "learns nothing"


class Dull(gym.Env[np.ndarray, Any]):
    """Gives one reward, in episodes of one length, whatever the action is."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, config: Any) -> None:
        self.reward, self.length = config.get("reward", 0.0), config.get("length", 25)
        self.action_space: Any = gym.spaces.Box(-1, 1, (1,)) if config.get("box") else gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return np.zeros(2, np.float32), self.reward, self.at == self.length, False, {}


def trained(config: Any, caplog: pytest.LogCaptureFixture, most: int = 60) -> tuple[Any, list[str]]:
    """The first result with a warning, or the last one, and the warnings of the log after two more iterations."""
    config.debugging(seed=0)
    result: Any = {}
    with caplog.at_level(logging.WARNING), config.build() as algorithm:
        for _ in range(most):
            result = algorithm.train()
            if "warnings" in result or result["timesteps_total"] >= 3 * LEAST_STEPS:
                break
        algorithm.train()
        assert ("warnings" in algorithm.train()) == ("warnings" in result)
    return result, [record.message for record in caplog.records if NOTHING in record.message]


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        (PPOConfig().training(train_batch_size=1000, minibatch_size=1000, num_epochs=1), 0.0),
        (PGConfig().training(train_batch_size=1000), 0.5),
        (APPOConfig().env_runners(num_env_runners=0, num_envs_per_env_runner=10), 0.0),
        (DQNConfig().training(training_intensity=1.0).env_runners(num_envs_per_env_runner=8), 0.0),
        (SACConfig().training(train_batch_size=8, training_intensity=0.1).env_runners(num_envs_per_env_runner=8), -1.0),
    ],
)  # fmt: skip
def test_equal_rewards_are_said_once(config: Any, reward: float, caplog: pytest.LogCaptureFixture) -> None:
    config = config.copy().environment(Dull, env_config={"reward": reward, "box": isinstance(config, SACConfig)})
    result, logged = trained(config, caplog)
    assert LEAST_STEPS <= result["timesteps_total"] < 2.5 * LEAST_STEPS
    assert len(logged) == 1
    (text,) = result["warnings"]
    assert "the policy 'default_policy' learns nothing: in all " in text
    assert f"the reward is {reward:g}" in text
    assert ("every terminated episode has 25 steps" in text) == (reward != 0)
    assert "Check what the environment's step() returns" in text


def test_rewards_that_depend_on_the_policy_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    config = PGConfig().environment("CartPole-v1").training(train_batch_size=1000)  # rewards of 1, other lengths
    result, logged = trained(config, caplog)
    assert "warnings" not in result
    assert logged == []


def test_what_was_seen_is_in_the_checkpoint(tmp_path: Path) -> None:
    config = PGConfig().environment("CartPole-v1").training(train_batch_size=500).debugging(seed=0)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
        seen = algorithm.signal.get_state()
    assert seen["default_policy"]["varies"]
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as algorithm:
        assert algorithm.signal.get_state() == seen


def test_imitation_needs_no_rewards() -> None:
    batch = SampleBatch(
        obs=np.zeros((64, 2), np.float32), actions=np.arange(64) % 2, rewards=np.zeros(64, np.float32),
        terminateds=np.arange(64) == 63, truncateds=np.zeros(64, bool),
    )  # fmt: skip
    config = BCConfig().environment(Dull).offline_data(input_=batch, dataset_num_iters_per_learner=300)
    with config.build() as algorithm:
        assert "warnings" not in algorithm.train()
        assert algorithm.signal.get_state() == {}


def test_equal_advantages_are_said_at_any_time() -> None:
    watch, rng, rows = SignalWatch(), np.random.default_rng(0), LEAST_STEPS // LEAST_BATCHES

    def batch(advantages: np.ndarray) -> dict[str, np.ndarray]:
        return {"rewards": rng.normal(size=rows), "advantages": advantages, "value_targets": np.ones(rows)}

    watch.add("a", batch(rng.normal(size=rows)))
    for number in range(LEAST_BATCHES):
        assert watch.warnings() == [], number
        watch.add("a", batch(np.full(rows, 0.25) + 1e-8 * rng.normal(size=rows)))
    (text,) = watch.warnings()
    assert f"all advantages of the last {LEAST_BATCHES} batches, {LEAST_STEPS:,} rows, are equal" in text
    watch.add("a", batch(1e-3 * rng.normal(size=rows)))
    assert watch.warnings() == []


def test_each_policy_is_watched_by_itself() -> None:
    watch = SignalWatch()
    for number in range(LEAST_BATCHES):
        watch.add("still", {"rewards": np.zeros(LEAST_STEPS // LEAST_BATCHES)})
        watch.add("lives", {"rewards": np.arange(LEAST_STEPS // LEAST_BATCHES) + number})
    (text,) = watch.warnings()
    assert "'still'" in text


@pytest.mark.parametrize(
    ("ends", "is_a_fault"), [([], True), ([9, 9], True), ([9, 8], False)],
)  # fmt: skip
def test_lengths_count_if_the_reward_is_not_zero(ends: list[int], is_a_fault: bool) -> None:
    watch, rows = SignalWatch(), LEAST_STEPS // LEAST_BATCHES
    for number in range(LEAST_BATCHES):
        terminateds, times = np.zeros(rows, bool), np.zeros(rows, np.int64)
        if number < len(ends):
            terminateds[3], times[3] = True, ends[number]
        watch.add("a", {"rewards": np.ones(rows), "terminateds": terminateds, "t": times})
    assert bool(watch.warnings()) == is_a_fault
