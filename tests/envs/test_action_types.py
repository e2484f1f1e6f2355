"""Actions of a Box whose numbers are not float32: batches have them, and all algorithms learn from them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import BCConfig, PPOConfig, SACConfig, SampleBatch, TD3Config
from rlmesh.envs.modules.continuous import SACModule, TD3Module

SMALL: dict[str, Any] = {"model": {"fcnet_hiddens": (8,)}}
OFF_POLICY: dict[str, Any] = {
    **SMALL, "train_batch_size": 8, "num_steps_sampled_before_learning_starts": 16, "rollout_fragment_length": 8,
}  # fmt: skip
MEMORY: dict[str, Any] = {
    **OFF_POLICY, "model": {"fcnet_hiddens": (8,), "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4},
    "replay_buffer_config": {"type": "SequenceReplayBuffer", "capacity": 1000},
}  # fmt: skip


class Reach(gym.Env[np.ndarray, np.ndarray]):
    """Moves a point on a line by actions of the given type; the reward is minus its distance to 0."""

    observation_space = gym.spaces.Box(-10, 10, (1,), np.float32)

    def __init__(self, config: Any) -> None:
        self.action_space = gym.spaces.Box(-1, 1, (2,), config["dtype"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = 1.0, 0
        return np.array([self.x], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert action.dtype == self.action_space.dtype, action.dtype
        assert self.action_space.contains(action)
        self.x, self.t = float(np.clip(self.x + action.sum(), -10, 10)), self.t + 1
        return np.array([self.x], np.float32), -abs(self.x), False, self.t == 10, {}


def config_of(kind: Any, dtype: Any, **settings: Any) -> Any:
    config = kind().environment(Reach, env_config={"dtype": dtype}).debugging(seed=0).update_from_dict(settings)
    return config.reporting(min_env_steps_per_iteration=0).env_runners(num_envs_per_env_runner=2)


def learned(kind: Any, dtype: Any, settings: dict[str, Any], iterations: int = 6) -> tuple[dict[str, float], Any]:
    with config_of(kind, dtype, **settings).build() as algorithm:
        result, before = {}, algorithm.get_weights()["default_policy"]
        for _ in range(iterations):
            result = algorithm.train()
        after = algorithm.get_weights()["default_policy"]
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        action = algorithm.compute_single_action(np.zeros(1, np.float32), explore=False)
        return result["learners"]["default_policy"]["learner_stats"], action


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SACConfig, OFF_POLICY), (TD3Config, OFF_POLICY), (SACConfig, MEMORY), (TD3Config, MEMORY),
        (PPOConfig, {**SMALL, "train_batch_size": 40, "minibatch_size": 20, "num_epochs": 2}),
    ],
    ids=["SAC", "TD3", "SAC with memory", "TD3 with memory", "PPO"],
)  # fmt: skip
def test_actions_of_float64_are_learnt_from_as_those_of_float32(kind: Any, settings: dict[str, Any]) -> None:
    wide, action = learned(kind, np.float64, settings)
    narrow, _ = learned(kind, np.float32, settings)
    assert (action[0] if isinstance(action, tuple) else action).dtype == np.float64
    assert wide.keys() == narrow.keys()
    for name, value in wide.items():
        assert value == pytest.approx(narrow[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("kind", [SACConfig, TD3Config])
def test_actions_of_float16_are_learnt_from(kind: Any) -> None:
    stats, _ = learned(kind, np.float16, OFF_POLICY)
    assert all(np.isfinite(value) for value in stats.values())


def test_recorded_actions_of_float64_are_cloned() -> None:
    rng = np.random.default_rng(0)
    steps = {
        "obs": rng.normal(size=(40, 1)).astype(np.float32), "actions": rng.uniform(-1, 1, (40, 2)),
        "rewards": np.zeros(40, np.float32), "terminateds": np.arange(40) % 10 == 9,
        "truncateds": np.zeros(40, bool), "eps_id": np.arange(40) // 10,
    }  # fmt: skip
    settings = {**SMALL, "input_": SampleBatch(steps), "train_batch_size": 40, "lr": 1e-2}
    with config_of(BCConfig, np.float64, **settings).build() as algorithm:
        losses = [algorithm.train()["learners"]["default_policy"]["learner_stats"]["policy_loss"] for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", [SACModule, TD3Module])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_scaled_actions_stay_within_the_box(kind: Any, dtype: Any) -> None:
    """By rounding, the middle plus half of the width may be larger than the upper bound."""
    rng = np.random.default_rng(0)
    low = rng.uniform(-3, 3, 200).astype(dtype)
    high = (low + rng.uniform(0.1, 5, 200)).astype(dtype)
    space = gym.spaces.Box(low, high, dtype=dtype)
    distribution = kind(Reach.observation_space, space).distribution
    for end, bound in ((-1, low), (1, high)):
        action = distribution.to_env(np.full((3, 200), end, np.float32))
        assert action.dtype == dtype
        assert all(map(space.contains, action))
        np.testing.assert_allclose(action[0], bound, rtol=0.01, atol=0.01)


def test_a_box_as_wide_as_its_type_has_scaled_actions() -> None:
    most = np.finfo(np.float32).max
    distribution = SACModule(Reach.observation_space, gym.spaces.Box(-most, most, (1,))).distribution
    assert distribution.to_env(np.array([[-1], [0], [0.5]], np.float32)).tolist() == [[-most], [0], [most / 2]]
