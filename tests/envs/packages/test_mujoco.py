"""Training in an environment of MuJoCo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmesh.envs import PPOConfig, SACConfig

pytest.importorskip("mujoco", reason="MuJoCo is not installed: rlmesh[mujoco]")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of its own, since MuJoCo writes its warnings there, into ``MUJOCO_LOG.TXT``."""
    monkeypatch.chdir(tmp_path)


def test_ppo_steps_in_mujoco() -> None:
    config = PPOConfig().environment("HalfCheetah-v5").debugging(seed=0).env_runners(num_envs_per_env_runner=2)
    with config.training(train_batch_size=128, minibatch_size=64, num_epochs=2).build() as algorithm:
        batch = algorithm.env_runner.sample(64)
        assert batch["obs"].shape == (64, 17)
        assert batch["actions"].shape == (64, 6)
        algorithm.train()
        assert algorithm.train()["timesteps_total"] >= 256


@pytest.mark.slow
def test_sac_balances_an_inverted_pendulum() -> None:
    """The reward is 1 per step; the mean action of an untrained policy falls after about 23 steps."""
    config: Any = SACConfig().environment("InvertedPendulum-v5").debugging(seed=0).evaluation(evaluation_duration=5)
    config.rl_module(model_config={"fcnet_hiddens": (64, 64)}).reporting(min_env_steps_per_iteration=500)
    with config.training(
        num_steps_sampled_before_learning_starts=500, lr=1e-3, train_batch_size=128
    ).build() as algorithm:
        best = 0.0
        while best < 60 and algorithm.env_steps_sampled < 3000:
            algorithm.train()
            best = max(best, algorithm.evaluate()["episode_reward_mean"])
    assert best >= 60
