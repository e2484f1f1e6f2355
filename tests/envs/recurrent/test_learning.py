"""A task that needs memory: modules with memory solve it, others stay at chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.envs import (
    A2CConfig,
    Algorithm,
    APPOConfig,
    DQNConfig,
    IMPALAConfig,
    PGConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
)
from rlmesh.envs.learners.recurrent.dqn import RecurrentDQNLearner
from rlmesh.envs.modules.q_module import QModule
from rlmesh.errors import UsageError

from .tasks import ATTENTION, LSTM, Cue

WITH_LSTM = {**LSTM, "lstm_cell_size": 16, "max_seq_len": 8}
WITH_ATTENTION = {**ATTENTION, "attention_dim": 16, "max_seq_len": 8}
GOAL = 0.95
SETTINGS: dict[str, Any] = {
    "PPO": PPOConfig().training(train_batch_size=512, minibatch_size=128, num_epochs=4, lr=5e-3),
    "A2C": A2CConfig().training(train_batch_size=256, lr=1e-2).reporting(min_env_steps_per_iteration=0),
    "PG": PGConfig().training(train_batch_size=512, lr=2e-2),
    "IMPALA": IMPALAConfig().training(train_batch_size=256, lr=5e-3),
    "APPO": APPOConfig().training(train_batch_size=256, lr=5e-3, circular_buffer_num_batches=2),
}
for each in (SETTINGS["IMPALA"], SETTINGS["APPO"]):
    each.env_runners(num_env_runners=0, rollout_fragment_length=10).reporting(min_env_steps_per_iteration=1000)


def of_cue(config: Any, model: dict[str, Any], seed: int) -> Any:
    config = config.copy().environment(lambda context: Cue()).debugging(seed=seed)
    return config.rl_module(model_config=model).evaluation(evaluation_duration=200)


def return_of(algorithm: Any) -> float:
    return float(algorithm.evaluate()["episode_reward_mean"])


@pytest.mark.parametrize(
    ("name", "model", "iterations"),
    [
        ("PPO", WITH_LSTM, 30),
        ("PPO", WITH_ATTENTION, 30),
        ("A2C", WITH_LSTM, 100),
        ("PG", WITH_LSTM, 100),
        ("IMPALA", WITH_LSTM, 30),
        ("APPO", WITH_LSTM, 20),
        pytest.param("IMPALA", WITH_ATTENTION, 40, marks=pytest.mark.slow),
    ],
    ids=["PPO-lstm", "PPO-attention", "A2C-lstm", "PG-lstm", "IMPALA-lstm", "APPO-lstm", "IMPALA-attention"],
)
def test_memory_solves_the_task(name: str, model: dict[str, Any], iterations: int) -> None:
    with of_cue(SETTINGS[name].env_runners(num_envs_per_env_runner=16), model, 0).build() as algorithm:
        for _ in range(iterations):
            if algorithm.train()["env_runners"]["episode_return_mean"] >= 0.97:
                break
        assert return_of(algorithm) >= GOAL


def test_without_memory_the_task_stays_at_chance() -> None:
    config = SETTINGS["PPO"].copy().env_runners(num_envs_per_env_runner=16)
    with of_cue(config, {"fcnet_hiddens": (32,)}, 0).evaluation(evaluation_duration=1000).build() as algorithm:
        for _ in range(10):
            algorithm.train()
        assert abs(return_of(algorithm)) <= 0.15  # 0 plus noise: a standard deviation of 1 / sqrt(1000) = 0.03


def dqn(seed: int = 0, **more: Any) -> Any:
    config = DQNConfig().training(
        replay_buffer_config={"type": "SequenceReplayBuffer", "capacity": 4000, "replay_burn_in": 2}, n_step=2,
        train_batch_size=160, num_steps_sampled_before_learning_starts=500, training_intensity=None, lr=3e-3,
        epsilon=[[0, 1.0], [2000, 0.05]], target_network_update_freq=40,
    )  # fmt: skip
    config.env_runners(rollout_fragment_length=1, num_envs_per_env_runner=8).training(**more)
    return of_cue(config, {**WITH_LSTM, "max_seq_len": 5}, seed)


def test_dqn_with_memory_solves_the_task() -> None:
    with dqn().build() as algorithm:
        while algorithm.env_steps_sampled < 6000:
            algorithm.train()
            if return_of(algorithm) >= GOAL:
                return
    raise AssertionError(f"the return was {return_of(algorithm)} after 6,000 steps")


def test_the_weights_of_sequences_are_those_of_their_steps() -> None:
    buffer = {"type": "PrioritizedSequenceReplayBuffer", "capacity": 4000, "replay_burn_in": 2, "eta": 0.8}
    with dqn(replay_buffer_config=buffer, num_steps_sampled_before_learning_starts=100_000).build() as algorithm:
        algorithm.train()
        batch = algorithm.replay.sample(40)
        batch["weights"] = np.linspace(0.1, 1, 40, dtype=np.float32)
        loss = algorithm.learner.update(batch)["total_loss"]
        errors = np.abs(algorithm.learner.td_errors)
        losses = np.where(errors < 1, 0.5 * errors**2, errors - 0.5)
        each = batch["weights"][np.nonzero(batch["learn_mask"])[0]]
        assert len(each) == len(losses)
        assert loss == pytest.approx((losses * each).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", [DQNConfig, pytest.param(SACConfig, marks=pytest.mark.slow), TD3Config])
def test_priorities_of_sequences_follow_their_errors_and_are_in_the_checkpoint(kind: Any, tmp_path: Path) -> None:
    buffer = {"type": "PrioritizedSequenceReplayBuffer", "capacity": 4000, "replay_burn_in": 2, "eta": 0.8}
    config = kind().environment("CartPole-v1" if kind is DQNConfig else "Pendulum-v1").debugging(seed=0)
    config.training(replay_buffer_config=buffer, train_batch_size=20, num_steps_sampled_before_learning_starts=50)
    config.rl_module(model_config={"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": (8,), "max_seq_len": 5})
    config.env_runners(rollout_fragment_length=20).reporting(min_env_steps_per_iteration=100)
    with config.build() as algorithm:
        algorithm.train()
        priorities = algorithm.replay.state()["priorities"]
        assert len(np.unique(priorities[priorities > 0])) > 3
        algorithm.save(tmp_path / "checkpoint")
        algorithm.train()
        wanted = algorithm.replay.state()["priorities"]
    restored: Any = Algorithm.from_checkpoint(tmp_path / "checkpoint")
    with restored:
        restored.train()
        assert np.array_equal(restored.replay.state()["priorities"], wanted)


def test_dqn_with_memory_and_priorities_solves_the_task() -> None:
    buffer = {"type": "PrioritizedSequenceReplayBuffer", "capacity": 4000, "replay_burn_in": 2}
    with dqn(replay_buffer_config=buffer).build() as algorithm:
        while algorithm.env_steps_sampled < 6000:
            algorithm.train()
            if return_of(algorithm) >= GOAL:
                return
    raise AssertionError(f"the return was {return_of(algorithm)} after 6,000 steps")


@pytest.mark.parametrize(("n_step", "double_q"), [(1, True), (3, True), (3, False)])
def test_targets_of_sequences(n_step: int, double_q: bool) -> None:
    """Errors of padded sequences, also with rubbish in the padding, are those of a loop over single steps."""
    with dqn(n_step=n_step, double_q=double_q, num_steps_sampled_before_learning_starts=100_000).build() as algorithm:
        algorithm.train()
        learner: Any = algorithm.learner
        assert isinstance(learner, RecurrentDQNLearner)
        with torch.no_grad():
            for parameter in learner.target.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        batch = algorithm.replay.sample(40)
        expected = errors_by_hand(learner, batch, n_step, double_q)
        for column in batch.values():
            if column.shape[:2] == batch["mask"].shape and column.dtype.kind == "f":
                column[~batch["mask"]] = np.nan
        learner.update(batch)
        assert not batch["mask"].all()
        assert len(expected) == batch["learn_mask"].sum() == len(learner.td_errors)
        assert np.abs(learner.td_errors - expected).max() <= 1e-5
        assert all(bool(p.isfinite().all()) for p in learner.module.parameters())


def test_sequences_that_end_within_their_burn_in_change_nothing() -> None:
    with dqn(num_steps_sampled_before_learning_starts=100_000).build() as algorithm:
        algorithm.train()
        before = algorithm.get_weights()["default_policy"]
        batch = algorithm.replay.sample(40)
        batch["learn_mask"][:] = False
        stats = algorithm.learner.update(batch)
        assert stats["total_loss"] == stats["qf_mean"] == 0
        after = algorithm.get_weights()["default_policy"]
    assert all(np.array_equal(value, after[name]) for name, value in before.items())


def errors_by_hand(learner: Any, batch: dict[str, np.ndarray], n_step: int, double_q: bool) -> np.ndarray:
    gamma, errors = learner.config["gamma"], []
    for row in range(len(batch["mask"])):
        length = int(batch["mask"][row].sum())
        obs = np.concatenate([batch["obs"][row, :length], batch["new_obs"][row, length - 1 : length]])
        states = {name: torch.from_numpy(batch[f"state_in_{name}"][row : row + 1]) for name in ("h", "c")}
        with torch.no_grad():
            now, late = (net.values_over(torch.from_numpy(obs)[None], states)[0][0].numpy()
                         for net in (learner.module, learner.target))  # fmt: skip
        best = (now if double_q else late).argmax(-1)
        for t in range(length):
            if not batch["learn_mask"][row, t]:
                continue
            k = min(n_step, length - t)
            target = sum(gamma**i * batch["rewards"][row, t + i] for i in range(k))
            if not batch["terminateds"][row, t + k - 1]:
                target += gamma**k * late[t + k, best[t + k]]
            errors.append(target - now[t, batch["actions"][row, t]])
    return np.array(errors)


def test_dqn_with_memory_goes_on_exactly_after_a_restore(tmp_path: Path) -> None:
    config = dqn(num_steps_sampled_before_learning_starts=50).reporting(min_env_steps_per_iteration=100)
    with config.build() as one, config.build() as other:
        one.train()
        one.save(tmp_path / "checkpoint")
        results = [one.train()]
        other.restore(tmp_path / "checkpoint")
        results.append(other.train())
        ours, theirs = (algorithm.get_weights()["default_policy"] for algorithm in (one, other))
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items())
    assert results[0]["learners"] == results[1]["learners"]


@pytest.mark.slow
def test_remote_runners_keep_their_states_too(tmp_path: Path) -> None:
    """Two runs of one seed, one of them restored in the middle of episodes, end with the same weights."""
    config = of_cue(SETTINGS["PPO"], WITH_LSTM, 1).training(train_batch_size=36, minibatch_size=18)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    with config.build() as one:
        one.train()
        one.save(tmp_path / "one")
        one.train()
        expected = one.get_weights()["default_policy"]
    with config.build() as other:
        other.restore(tmp_path / "one")
        states = other.env_runner_group.foreach_worker(
            lambda runner: bool(runner._states["h"].any()), local_worker=False
        )
        assert states == [True, True]
        other.train()
        weights = other.get_weights()["default_policy"]
    assert all(np.array_equal(value, weights[name]) for name, value in expected.items())


def test_a_target_network_has_the_memory_too() -> None:
    with dqn().build() as algorithm:
        target = algorithm.learner.target
        assert isinstance(target, QModule)
        assert target.memory is not algorithm.get_module().memory
        assert any(name.startswith("memory.") for name in algorithm.get_weights()["default_policy"])


def test_memory_and_the_buffer_of_sequences_belong_together() -> None:
    with pytest.raises(UsageError, match="belong together"):
        dqn(replay_buffer_config={"type": "ReplayBuffer"}).build()
    with pytest.raises(UsageError, match="belong together"):
        dqn().rl_module(model_config={}).build()
    with pytest.raises(UsageError, match="exclude each other"):
        dqn().rl_module(model_config={**WITH_LSTM, "use_attention": True}).build()
    with pytest.raises(UsageError, match="replay_burn_in belongs to the type 'SequenceReplayBuffer'"):
        DQNConfig().environment("CartPole-v1").training(replay_buffer_config={"replay_burn_in": 1}).build()
