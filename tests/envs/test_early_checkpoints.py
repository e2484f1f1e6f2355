"""Checkpoints of algorithms that have not trained yet, and states of runners that are between whole episodes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from rlmesh.envs import (
    Algorithm,
    AlgorithmConfig,
    DQNConfig,
    EnvRunner,
    IMPALAConfig,
    ModulePolicy,
    PPOConfig,
    make_multi_agent,
)

POLES = make_multi_agent("CartPole-v1")


def ppo() -> PPOConfig:
    return PPOConfig().environment("CartPole-v1").training(train_batch_size=128, minibatch_size=64, num_epochs=2)


CONFIGS: dict[str, AlgorithmConfig] = {
    "ppo": ppo(),
    "vector": ppo().env_runners(num_envs=2, vectorize_mode="sync"),
    "dqn": DQNConfig().environment("CartPole-v1").training(num_steps_sampled_before_learning_starts=50).env_runners(
        rollout_fragment_length=50).reporting(min_env_steps_per_iteration=100),
    "impala": IMPALAConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs=2).training(
        train_batch_size=100).reporting(min_env_steps_per_iteration=100),
    "agents": ppo().environment(POLES, env_config={"num_agents": 2}),
}  # fmt: skip


def trained(algorithm: Algorithm) -> list[np.ndarray]:
    for _ in range(2):
        algorithm.train()
    weights: dict[str, Any] = algorithm.get_weights()["default_policy"]
    return list(weights.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_run_restored_before_its_first_step_gives_the_same_numbers(config: AlgorithmConfig, tmp_path: Path) -> None:
    config = config.copy().debugging(seed=5)
    with config.build() as algorithm:
        algorithm.save(tmp_path / "new")
        wanted = trained(algorithm)
    with config.build() as algorithm:
        algorithm.restore(tmp_path / "new")
        assert all(map(np.array_equal, trained(algorithm), wanted))
        algorithm.restore(tmp_path / "new")  # of an algorithm that has learnt since
        assert all(map(np.array_equal, trained(algorithm), wanted))


def test_a_runner_between_whole_episodes_goes_on_exactly() -> None:
    def runner() -> EnvRunner:
        return EnvRunner("CartPole-v1", ModulePolicy, num_envs=3, seed=1)

    one, other = runner(), runner()
    one.sample(num_episodes=4)
    other.set_state(cloudpickle.loads(cloudpickle.dumps(one.get_state())))
    assert other.sample(num_episodes=4) == one.sample(num_episodes=4)
    assert other.sample(30) == one.sample(30)


@pytest.mark.parametrize("agents", [False, True])
def test_other_numbers_of_environments_and_runners_are_told(
    agents: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ppo().environment(POLES) if agents else ppo()
    with config.env_runners(num_envs=2).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "two")
        algorithm.restore(tmp_path / "two")
        assert not caplog.text
        states = algorithm.env_runner_group.runner_states()
    with config.env_runners(num_envs=3).build() as algorithm, caplog.at_level(logging.WARNING):
        algorithm.restore(tmp_path / "two")
        assert "the state has 2 environments, and this runner has 3: new episodes begin" in caplog.text
        algorithm.env_runner_group.set_runner_states(cloudpickle.dumps(states * 2))
        assert "the checkpoint has the episodes of 2 runners, and 1 sample now: those of the others" in caplog.text
        assert algorithm.train()["training_iteration"] == 2
