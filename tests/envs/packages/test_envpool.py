"""EnvPool as a vector backend: its steps are those of Gymnasium's environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import Algorithm, EnvRunner, ModulePolicy, PPOConfig
from rlmesh.errors import UsageError

pytest.importorskip("envpool", reason="EnvPool is not installed: rlmesh[envpool]")

ENVPOOL: dict[str, Any] = {"vectorize_mode": "envpool", "env_config": {"num_threads": 1}}


def runner_of(env_id: str = "CartPole-v1", seed: int | None = 7, size: int = 4, **config: Any) -> EnvRunner:
    given = {**ENVPOOL, "env_config": {**ENVPOOL["env_config"], **config}}
    return EnvRunner(env_id, ModulePolicy, num_envs=size, seed=seed, infos=False, **given)


def test_each_step_is_that_of_gymnasium() -> None:
    """Final observations are there, and no step leads from one episode to the next."""
    runner = runner_of(max_episode_steps=25)
    ours: Any = gym.make("CartPole-v1").unwrapped
    assert runner.observation_space.shape == ours.observation_space.shape
    assert runner.action_space == ours.action_space
    batch = runner.sample(1200)
    assert batch["truncateds"].any() and batch["terminateds"].any()
    ours.reset(seed=0)
    for row in range(len(batch)):
        ours.state, ours.steps_beyond_terminated = tuple(batch["obs"][row].astype(np.float64)), None
        observation, reward, terminated, _, _ = ours.step(int(batch["actions"][row]))
        assert np.abs(observation - batch["new_obs"][row]).max() <= 1e-5
        assert reward == batch["rewards"][row]
        near = abs(abs(observation[2]) - ours.theta_threshold_radians) < 1e-5
        assert near or terminated == batch["terminateds"][row]
    for episode in batch.split_by_episode():
        first = int(episode["t"][0])
        assert episode["t"].tolist() == list(range(first, first + len(episode)))
        assert np.array_equal(episode["obs"][1:], episode["new_obs"][:-1])
        assert not episode["dones"][:-1].any()
        assert np.array_equal(episode["truncateds"], episode["t"] == 24)
        if first == 0:
            assert np.abs(episode["obs"][0]).max() <= 0.05
    stats = runner.take_stats()
    assert len(stats) == batch["dones"].sum()
    assert stats.lengths == [int(each) for each in stats.returns]


def test_each_environment_has_a_seed_of_its_own() -> None:
    one, same, other, free = (runner_of(seed=seed).sample(40)["obs"] for seed in (7, 7, 8, None))
    assert np.array_equal(one, same)
    assert not np.array_equal(one[:10], other[:10])
    assert not np.array_equal(free, runner_of(seed=None).sample(40)["obs"])  # EnvPool's own default is always 42
    assert len({row.tobytes() for row in one[::10]}) == 4


def test_a_restored_runner_plays_other_episodes() -> None:
    runner = runner_of()
    before = runner.sample(40)
    state = runner.get_state()
    restored = runner_of()
    restored.set_state(state)
    after = restored.sample(40)
    assert (after["t"][::10] == 0).all()
    assert not {row.tobytes() for row in before["obs"][::10]} & {row.tobytes() for row in after["obs"][::10]}
    assert set(after["eps_id"]).isdisjoint(before["eps_id"])


def test_ppo_learns_with_it(tmp_path: Path) -> None:
    config = PPOConfig().environment("CartPole-v1", env_config=ENVPOOL["env_config"]).debugging(seed=0)
    config.env_runners(vectorize_mode="envpool", num_envs_per_env_runner=8)
    with config.training(train_batch_size=1024, minibatch_size=128).build() as algorithm:
        for _ in range(11):
            algorithm.train()
        result = algorithm.train()
        assert result["env_runners"]["episode_return_mean"] >= 80  # a random policy has 22
        algorithm.save(tmp_path / "one")
    with Algorithm.from_checkpoint(tmp_path / "one") as algorithm:
        assert algorithm.train()["training_iteration"] == 13


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"EnvPool has no environment 'CartPole-v3'.*Did you mean"):
        gym.register("CartPole-v3", "gymnasium.envs.classic_control:CartPoleEnv")
        try:
            runner_of("CartPole-v3")
        finally:
            gym.registry.pop("CartPole-v3")
    with pytest.raises(UsageError, match="'num_envs': runners set the number"):
        runner_of(num_envs=3)
    with pytest.raises(UsageError, match="is for ids"):
        EnvRunner(lambda context: gym.make("CartPole-v1"), ModulePolicy, vectorize_mode="envpool")


def test_ids_that_only_envpool_has() -> None:
    with pytest.raises(UsageError, match="is an environment of EnvPool: set env_runners"):
        EnvRunner("Catch-v0", ModulePolicy)
    batch = runner_of("Catch-v0", size=2).sample(60)
    assert batch["dones"].sum() == 6  # the ball falls for nine steps... in rows of ten
    with pytest.raises(UsageError, match="there is no environment 'Cacth-v0'"):
        EnvRunner("Cacth-v0", ModulePolicy)
