"""Algorithms: training steps, results, evaluation, checkpoints; and that they learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import (
    PPO,
    A2CConfig,
    Algorithm,
    AlgorithmConfig,
    Learner,
    PGConfig,
    PPOConfig,
    ResultDict,
    SampleBatch,
)
from rlmesh.errors import UsageError

from .environments import Copy, Count, Frames, Target


def small(**training: Any) -> PPOConfig:
    settings = {"train_batch_size": 64, "minibatch_size": 32, "num_epochs": 2, **training}
    return PPOConfig().environment("CartPole-v1").training(**settings).debugging(seed=1).env_runners(num_envs=4)


def weights_of(algorithm: Algorithm) -> np.ndarray:
    weights = algorithm.get_weights()["default_policy"]
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


def test_results_are_nested() -> None:
    with small().build() as algorithm:
        result = algorithm.train()
        result = algorithm.train()
    assert isinstance(result, ResultDict)
    assert result["training_iteration"] == 2
    assert result["env_runners"]["num_env_steps_sampled"] == 64
    assert result["num_env_steps_sampled_lifetime"] == 128
    assert result["learners"]["default_policy"]["num_agent_steps_trained"] == 64
    stats = result["info"]["learner"]["default_policy"]["learner_stats"]
    assert {"policy_loss", "vf_loss", "entropy", "kl", "grad_norm", "curr_lr"} <= stats.keys()
    assert math.isfinite(stats["total_loss"])
    assert "learner_stats:" in str(result)


def test_each_episode_is_counted_once() -> None:
    config = PGConfig().environment(lambda c: Count()).env_runners(num_envs=2).training(train_batch_size=13)
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(10)]
    # 70 steps of each environment: 7 rounds of episodes of 3, 5 and 2 steps
    assert sum(result["env_runners"]["num_episodes"] for result in results) == 42
    assert results[-1]["env_runners"]["episode_return_mean"] == 8.0
    assert results[-1]["timesteps_total"] == 140


def test_runs_of_one_seed_are_equal() -> None:
    def trained(seed: int) -> np.ndarray:
        with small().debugging(seed=seed).build() as algorithm:
            algorithm.train()
            return weights_of(algorithm)

    assert np.array_equal(trained(3), trained(3))
    assert not np.array_equal(trained(3), trained(4))


@pytest.mark.parametrize("config", [small(), small(kl_coeff=0.2, lr=[[0, 1e-3], [500, 0]]), PGConfig()])
def test_a_restored_run_goes_on_exactly(tmp_path: Path, config: AlgorithmConfig) -> None:
    config = config.copy().environment("CartPole-v1").debugging(seed=2).training(train_batch_size=64)
    with config.build() as whole:
        results = [whole.train() for _ in range(4)]
        expected_weights = weights_of(whole)
    with config.build() as first:
        first.train()
        first.train()
        assert first.save(tmp_path / "checkpoint") == str(tmp_path / "checkpoint")
        first.train()  # changes nothing in the checkpoint
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as second:
        assert type(second) is config.algorithm_class
        second.train()
        result = second.train()
        assert np.array_equal(weights_of(second), expected_weights)
    for name in ("env_runners", "learners", "training_iteration", "timesteps_total"):
        assert result[name] == results[-1][name], name
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]  # nothing is left aside


def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    with small().build() as algorithm:
        with pytest.raises(UsageError, match="has no checkpoint"):
            algorithm.restore(tmp_path)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("mine")
        with pytest.raises(UsageError, match="not empty and no checkpoint"):
            algorithm.save(tmp_path / "other")
        algorithm.save(tmp_path / "one")
        algorithm.save(tmp_path / "one")
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    with PGConfig().environment("CartPole-v1").build() as other, pytest.raises(UsageError, match="of PPO, not of PG"):
        other.restore(tmp_path / "one")
    wider = small().rl_module(model_config={"fcnet_hiddens": (8,)})
    with wider.build() as other, pytest.raises(UsageError, match=r"the networks of .* are others"):
        other.restore(tmp_path / "one")


def test_a_loss_that_is_no_number_leaves_the_weights_as_they_were() -> None:
    with small().build() as algorithm:
        algorithm.train()
        before = weights_of(algorithm)
        batch = algorithm.env_runner.sample(64)
        batch["advantages"][3] = np.nan
        with pytest.raises(FloatingPointError, match="policy_loss"):
            algorithm.learner_group.update(batch)
        assert np.array_equal(weights_of(algorithm), before)
        algorithm.train()
        assert np.isfinite(weights_of(algorithm)).all()


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 127])
def test_each_row_is_used_once_per_epoch_in_minibatches_of_like_sizes(rows: int) -> None:
    class Counting(Learner):
        wants = ("obs",)

        def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen.append(batch["obs"][:, 0].tolist())
            loss = self.module.compute_values(batch).mean()
            return loss, {"mean": loss.detach()}

    seen: list[list[float]] = []
    with small().build() as algorithm:
        learner = Counting(algorithm.get_module(), {"minibatch_size": 32, "num_epochs": 3, "seed": 0})
        learner.update(SampleBatch(obs=np.repeat(np.arange(rows, dtype=np.float32)[:, None], 4, 1)))
    sizes = [len(part) for part in seen]
    assert max(sizes) <= 32
    assert max(sizes) - min(sizes) <= 1
    for epoch in range(3):
        parts = seen[epoch * len(seen) // 3 : (epoch + 1) * len(seen) // 3]
        assert sorted(row for part in parts for row in part) == list(range(rows))


def test_a_learner_leaves_torchs_own_generator_alone_and_takes_seed_0() -> None:
    module = small().build().get_module()
    before = torch.get_rng_state()
    Learner(module, {})
    assert torch.equal(torch.get_rng_state(), before)
    one, other = Learner(module, {"seed": 0}), Learner(module, {"seed": 0})
    assert torch.equal(one.generator.get_state(), other.generator.get_state())


def test_a_batch_without_the_columns_of_the_loss_is_refused() -> None:
    with small().build() as algorithm:
        batch = algorithm.env_runner.sample(8)
        del batch["advantages"]
        with pytest.raises(UsageError, match="PPOLearner needs the column 'advantages'"):
            algorithm.learner_group.update(batch)
        with pytest.raises(UsageError, match="no rows"):
            algorithm.learner_group.update(batch[:0])


def test_evaluation_plays_whole_episodes_without_exploration() -> None:
    config = small().evaluation(evaluation_interval=2, evaluation_duration=3)
    with config.build() as algorithm:
        assert "evaluation" not in algorithm.train()
        result = algorithm.train()["evaluation"]["env_runners"]
        assert result["num_episodes"] == 3
        weights = weights_of(algorithm)
        assert algorithm.evaluate()["env_runners"]["num_episodes"] == 3
        assert np.array_equal(weights, weights_of(algorithm))  # evaluation changes nothing


class Signs(gym.Env[np.ndarray, Any]):
    """Ten steps; the reward of action 1 is 1, that of action 0 is -1."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.zeros(1, np.float32), 2.0 * action - 1, self.left == 0, False, {}


def test_evaluation_of_steps_counts_no_episode_that_another_policy_began() -> None:
    config = PPOConfig().environment(lambda context: Signs()).env_runners(num_envs=1)
    config.evaluation(evaluation_duration=18, evaluation_duration_unit="timesteps")
    with config.build() as algorithm:
        bias = algorithm.get_module().get_parameter("policy_head.0.bias")
        for sign in (1.0, -1.0):
            with torch.no_grad():
                bias.copy_(torch.tensor([-50.0, 50.0]) * sign)
            result = algorithm.evaluate()["env_runners"]
            assert result["episode_return_mean"] == 10 * sign
            assert result["num_episodes"] == 1


def test_evaluation_does_not_change_the_training() -> None:
    def trained(interval: int | None) -> np.ndarray:
        with small().evaluation(evaluation_interval=interval, evaluation_duration=1).build() as algorithm:
            algorithm.train()
            algorithm.train()
            return weights_of(algorithm)

    assert np.array_equal(trained(None), trained(1))


def test_single_actions() -> None:
    with small().build() as algorithm:
        action = algorithm.compute_single_action(np.zeros(4, np.float32), explore=False)
        assert action in (0, 1)
        module = algorithm.get_module()
        logits = module.forward_inference({"obs": torch.zeros(1, 4)})["action_dist_inputs"]
        assert action == logits.argmax().item()
    with PGConfig().environment(lambda c: Copy()).build() as algorithm:
        assert algorithm.compute_single_action({"a": 1, "b": 2}).shape == (2,)
    with PGConfig().environment(lambda c: Target()).build() as algorithm:
        assert np.abs(algorithm.compute_single_action(np.ones(1, np.float32))).max() <= 1


def test_settings_as_a_mapping() -> None:
    with PPO({"env": "CartPole-v1", "train_batch_size": 32, "minibatch_size": 16}) as algorithm:
        assert algorithm.train()["timesteps_total"] == 32
    with pytest.raises(UsageError, match="Did you mean 'train_batch_size'"):
        PPO({"train_batch_sice": 32})


LEARNS: dict[str, Any] = {
    "box": (lambda c: Target(), {"lr": 3e-3, "train_batch_size": 512, "gamma": 0.0}, 25, -0.02),
    "multi": (lambda c: Copy(), {"lr": 3e-3, "train_batch_size": 512, "gamma": 0.0}, 15, 9.5),
    "frames": (
        lambda c: Frames(),
        {"lr": 1e-3, "train_batch_size": 256, "minibatch_size": 64, "num_epochs": 4, "gamma": 0.0,
         "model": {"conv_filters": [(8, 4, 4), (8, 3, 2)], "conv_features": 32}},
        12,
        1.95,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each == "multi")) for each in LEARNS])
def test_ppo_learns_in_each_kind_of_space(name: str) -> None:
    env, training, iterations, goal = LEARNS[name]
    config = PPOConfig().environment(env).training(**training).debugging(seed=0).env_runners(num_envs=8)
    with config.build() as algorithm:
        first = algorithm.evaluate()["episode_reward_mean"]
        for _ in range(iterations):
            algorithm.train()
        result = algorithm.evaluate()["episode_reward_mean"]
    assert first < goal - 0.05
    assert result >= goal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "goal", "most"),
    [
        (PPOConfig().training(train_batch_size=1024, minibatch_size=128, lr=1e-3), 475, 200_000),
        (PGConfig().training(train_batch_size=1000), 400, 400_000),
        (A2CConfig(), 400, 500_000),
    ],
    ids=["PPO", "PG", "A2C"],
)
def test_algorithms_learn_cartpole(config: AlgorithmConfig, goal: float, most: int) -> None:
    with config.copy().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        best = 0.0
        while best < goal:
            result = algorithm.train()
            best = max(best, result["env_runners"]["episode_return_mean"])
            assert result["timesteps_total"] < most, f"the best mean return was {best:.0f}"


class Unpicklable(Count):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it holds a socket")


def test_environments_that_cannot_be_pickled_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = PGConfig().environment(lambda c: Unpicklable()).training(train_batch_size=9).debugging(seed=1)
    with config.env_runners(num_envs=2).build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "one")
        assert "cannot be pickled, so a restored run begins new episodes: it holds a socket" in caplog.text
        seeds = set(Count.made)
        Count.made.clear()
        algorithm.restore(tmp_path / "one")
        assert algorithm.train()["training_iteration"] == 2
    assert not set(Count.made) & (seeds - {None})  # and do not repeat the first ones
