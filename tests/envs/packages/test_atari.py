"""One game of the Arcade Learning Environment, with stacked frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlmesh.envs import EnvRunner, ModulePolicy, Policy, PPOConfig
from rlmesh.envs.connectors import FrameStack, RewardClip

pytest.importorskip("ale_py", reason="ale-py is not installed: rlmesh[atari]")

GAME = "ALE/Pong-v5"


class Up(Policy):
    """Moves up."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        return np.full(len(obs_batch), 2), None, {}


def test_frames_of_the_games_own_vector_are_stacked_by_the_connector() -> None:
    """Four frames that the connector stacks are the four that the game's own vector stacks."""

    def frames(stack: int, connectors: Any) -> np.ndarray:
        runner = EnvRunner(
            GAME, Up, num_envs=2, seed=3, vectorize_mode="vector_entry_point", connectors=connectors, infos=False,
            env_config={"stack_num": stack, "num_threads": 1},
        )  # fmt: skip
        assert runner.observation_space.shape == (4, 84, 84)
        batch = runner.sample(24)
        assert batch["obs"].dtype == np.uint8
        runner.stop()
        return np.asarray(batch["obs"]).reshape(2, 12, 4, 84, 84)

    one, other = frames(1, [FrameStack(4)]), frames(4, [])
    assert np.array_equal(one[:, 3:], other[:, 3:])  # the game's own vector fills the first stacks with black frames
    assert (one[:, 11] != one[:, 4]).any()


def test_single_frames_are_stacked() -> None:
    runner = EnvRunner(
        GAME, ModulePolicy, seed=3, env_config={"obs_type": "grayscale"}, connectors=[FrameStack(4)], infos=False,
        policy_config={"model_config": {"conv_features": 16}},
    )  # fmt: skip
    obs = runner.sample(12)["obs"]
    assert obs.shape == (12, 210, 160, 4)
    assert np.array_equal(obs[1:, ..., :-1], obs[:-1, ..., 1:])
    assert obs[-1, ..., 0].std() > 0
    runner.stop()


@pytest.mark.slow
def test_the_value_of_frames_is_learnt() -> None:
    """PPO's convolutions fit the returns of one batch of Pong, and training goes on with numbers."""
    config = PPOConfig().environment(GAME, env_config={"num_threads": 1, "stack_num": 1}).debugging(seed=0)
    config.env_runners(
        vectorize_mode="vector_entry_point", num_envs_per_env_runner=4, connectors=[FrameStack(4), RewardClip()]
    ).training(train_batch_size=256, minibatch_size=64, num_epochs=2, lr=3e-4, model={"conv_features": 64})
    with config.build() as algorithm:
        batch = algorithm.env_runner.sample(256)
        losses = []
        for _ in range(6):
            stats = algorithm.learner_group.update(batch)["default_policy"]["learner_stats"]
            losses.append(stats["vf_loss"])
        assert losses[-1] < 0.5 * losses[0]
        assert np.isfinite(algorithm.train()["learners"]["default_policy"]["learner_stats"]["total_loss"])
