"""BC and MARWIL: policies from recorded steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.cli.main import main
from rlmesh.envs import (
    Algorithm,
    BCConfig,
    EnvRunner,
    MARWILConfig,
    ModulePolicy,
    Policy,
    PPOConfig,
    SampleBatch,
)
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.learners.marwil import MARWILLearner
from rlmesh.envs.offline import read_batch, write_batch
from rlmesh.envs.offline.recorded_steps import RecordedPart, RecordedSteps
from rlmesh.errors import UsageError

from .environments import Count

BALANCE = np.array([0.1, 0.3, 1.0, 0.6])
"""A linear controller of CartPole: position, velocity, angle, angular velocity."""


class Expert(Policy):
    """Pushes to the side to which the pole falls; at random with probability ``config["noise"]``."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        actions = (obs_batch @ BALANCE > 0).astype(np.int64)
        noise = self.config.get("noise", 0.0)
        anything = self.rng.random(len(actions)) < noise
        return np.where(anything, self.rng.integers(2, size=len(actions)), actions), None, {}


def recorded(episodes: int, noise: float = 0.0, seed: int = 0) -> SampleBatch:
    runner = EnvRunner("CartPole-v1", Expert, policy_config={"noise": noise}, num_envs=4, seed=seed, infos=False)
    return runner.sample(num_episodes=episodes)


def steps_of(parts: list[RecordedPart]) -> RecordedSteps:
    return RecordedSteps(parts, ObservationRows(Count.observation_space), Count.action_space)


def test_batches_in_files_come_back(tmp_path: Path) -> None:
    batch = recorded(2)
    assert write_batch(tmp_path / "a.npz", batch) == str(tmp_path / "a.npz")
    assert read_batch(tmp_path / "a.npz") == batch
    nested = SampleBatch(obs={"a": np.arange(3), "b": {"c": np.ones((3, 2))}}, infos=[{}, {}, {}])
    write_batch(tmp_path / "b.npz", nested)
    again = read_batch(tmp_path / "b.npz")
    assert again == SampleBatch(obs=nested["obs"])  # infos are objects
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]
    (tmp_path / "c.npz").write_text("no")
    with pytest.raises(UsageError, match=r"c\.npz is no file of a batch"):
        read_batch(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", obs=np.ones(2))
    with pytest.raises(UsageError, match="not written by write_batch"):
        read_batch(tmp_path / "d.npz")
    with pytest.raises(UsageError, match=r"ends with \.npz, not 'a\.json'"):
        write_batch(tmp_path / "a.json", batch)


def test_returns_end_with_termination_and_go_on_with_values_otherwise() -> None:
    def part(rewards: list[float], terminated: bool, last: bool = True) -> RecordedPart:
        observations = np.zeros((len(rewards) + last, 2), np.float32)
        observations[-1] = len(rewards)
        return RecordedPart("x", observations, np.zeros(len(rewards), np.int64), np.array(rewards), terminated)

    steps = steps_of([part([1, 2], True), part([1, 2, 4], False), part([3], False)])
    assert steps.last_observations().tolist() == [[3, 3], [1, 1]]
    returns = steps.returns(0.5, np.array([8.0, 2.0]))
    assert returns.tolist() == [2, 2, 1 + 1 + 1 + 1, 2 + 2 + 2, 4 + 4, 3 + 1]
    with pytest.raises(UsageError, match="x: an episode is not terminated, and the observation after its last step"):
        steps_of([part([1], False, last=False)]).last_observations()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": np.zeros((2, 3))}, r"observations have shape \(3,\), those of the environment \(2,\)"),
        ({"actions": np.array([2])}, r"some actions are not in Discrete\(2\)"),
        ({"actions": np.array([0.5])}, "actions are float64, those of the environment int64"),
        ({"rewards": np.array([np.nan])}, "some rewards are NaN"),
        ({"observations": np.full((2, 2), np.inf)}, "some observations are NaN or infinite"),
        ({"actions": np.zeros(2, int)}, "2 observations, 2 actions and 1 rewards are no episode"),
    ],
)
def test_steps_that_do_not_fit_the_environment_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"observations": np.zeros((2, 2)), "actions": np.zeros(1, int), "rewards": np.zeros(1)}
    with pytest.raises(UsageError, match=f"data: .*{message}|data: {message}"):
        steps_of([RecordedPart("data", terminated=True, **{**given, **change})])


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    config = MARWILConfig().environment("CartPole-v1")
    with pytest.raises(UsageError, match=r"offline_data\(input_=…\): name the recorded steps"):
        config.build()
    with pytest.raises(UsageError, match=r"input_: .*nothing.* has no files that end with \.npz or \.json"):
        config.copy().offline_data(input_=str(tmp_path / "nothing")).build()
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(UsageError, match="is neither a batch"):
        config.copy().offline_data(input_=[tmp_path / "a.csv"]).build()
    with pytest.raises(UsageError, match="beta=1: BC has beta=0"):
        BCConfig().environment("CartPole-v1").offline_data(input_=recorded(1)).training(beta=1).build()
    with pytest.raises(UsageError, match="input_: PPO samples its own steps"):
        PPOConfig().environment("CartPole-v1").offline_data(input_=recorded(1)).build()
    with pytest.raises(UsageError, match="num_env_runners: nothing is sampled"):
        config.copy().offline_data(input_=recorded(1)).env_runners(num_env_runners=1).build()


def test_the_weights_of_marwil_are_those_of_the_paper() -> None:
    policy = ModulePolicy(Count.observation_space, Count.action_space, {"seed": 3})
    config = {**MARWILConfig().policy_config(), "beta": 0.7, "moving_average_sqd_adv_norm_update_rate": 0.5}
    learner = MARWILLearner(policy.module, {**config, "moving_average_sqd_adv_norm_start": 4.0})
    random = np.random.default_rng(0)
    batch = SampleBatch(
        obs=random.normal(size=(6, 2)).astype(np.float32), actions=random.integers(2, size=6),
        value_targets=random.normal(size=6).astype(np.float32),
    )  # fmt: skip
    tensors = learner.tensors_of(batch)
    loss, _ = learner.loss(tensors)
    with torch.no_grad():
        outputs = policy.module.forward_train(tensors)
        assert policy.module.distribution is not None
        logp = policy.module.distribution.log_prob(outputs["action_dist_inputs"], tensors["actions"]).numpy()
    advantages = batch["value_targets"] - outputs["vf_preds"].numpy()
    norm = 4.0 + 0.5 * ((advantages**2).mean() - 4.0)
    weights = np.exp(0.7 * advantages / norm**0.5)
    assert loss.item() == pytest.approx(-(weights * logp).mean() + 0.5 * (advantages**2).mean(), rel=1e-4)


def cloned(source: Any, **training: Any) -> BCConfig:
    config = BCConfig().environment("CartPole-v1").offline_data(input_=source).debugging(seed=1)
    return config.training(lr=3e-3, train_batch_size=256, **training).evaluation(evaluation_duration=20)


def test_an_expert_is_cloned_from_files(tmp_path: Path) -> None:
    for seed in range(2):
        write_batch(tmp_path / f"{seed}.npz", recorded(4, seed=seed))
    with cloned(str(tmp_path / "*.npz")).build() as algorithm:
        before = algorithm.evaluate()["env_runners"]["episode_return_mean"]
        result: Mapping[str, Any] = {}
        for _ in range(10):
            result = algorithm.train()
        assert result["info"]["num_env_steps_trained"] == 10 * 16 * 256  # 4,000 steps, each of them once
        assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 0
        after = algorithm.evaluate()["env_runners"]["episode_return_mean"]
    assert before < 100
    assert after >= 450


def test_a_restored_run_goes_on_exactly(tmp_path: Path) -> None:
    def weights_of(algorithm: Algorithm) -> np.ndarray:
        weights = algorithm.get_weights()["default_policy"]
        return np.concatenate([weights[name].ravel() for name in sorted(weights)])

    config = MARWILConfig().environment("CartPole-v1").offline_data(input_=recorded(4, noise=0.5)).debugging(seed=1)
    config.training(train_batch_size=50, lr=1e-3).offline_data(dataset_num_iters_per_learner=3)
    with config.build() as whole:
        for _ in range(4):
            whole.train()
        expected = weights_of(whole)
    with config.build() as first:
        first.train()
        first.train()
        first.save(tmp_path / "checkpoint")
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as second:
        second.train()
        second.train()
        assert np.array_equal(weights_of(second), expected)
    with config.copy().offline_data(input_=recorded(1, noise=0.9)).build() as other:  # it has fewer rows
        assert len(other.data) < 50  # type: ignore[attr-defined]
        other.restore(tmp_path / "checkpoint")
        other.train()


def test_recordings_of_the_command_line_are_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        assert main(["env", "record", "CartPole-v1", "--seed", str(seed), "--to", str(tmp_path / f"{seed}.json")]) == 0
    capsys.readouterr()
    with cloned(tmp_path).build() as algorithm:
        data = algorithm.data  # type: ignore[attr-defined]
        assert [part.terminated for part in data.parts] == [True, True]
        env = gym.make("CartPole-v1")
        first, _ = env.reset(seed=1)
        assert np.array_equal(data.batch["obs"][0], first)
        second = env.step(int(data.batch["actions"][0]))[0]
        assert np.array_equal(data.batch["obs"][1], second)
        algorithm.train()
    with pytest.raises(UsageError, match=r"1\.json: the environment plays this episode differently today: reset was"):
        cloned(tmp_path).environment("CartPole-v1", env_config={"sutton_barto_reward": True}).environment(
            lambda context: gym.wrappers.TransformObservation(gym.make("CartPole-v1"), lambda o: o * 2, None)
        ).build()


@pytest.mark.slow
def test_marwil_prefers_the_better_of_mixed_episodes() -> None:
    """Half of the data is of a policy that mostly acts at random."""
    both = SampleBatch.concat_samples([recorded(10, noise=0.1), recorded(200, noise=0.9, seed=1)])
    with (
        MARWILConfig().environment("CartPole-v1").offline_data(input_=both).debugging(seed=1)
        .training(lr=1e-3, train_batch_size=500, beta=1.0, moving_average_sqd_adv_norm_update_rate=1e-2)
        .evaluation(evaluation_duration=20).build() as algorithm
    ):  # fmt: skip
        for _ in range(40):
            algorithm.train()
        assert algorithm.evaluate()["env_runners"]["episode_return_mean"] >= 300


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Minari, on authors and links of the data set
def test_an_expert_is_cloned_from_a_minari_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="Minari is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    batch = recorded(6)
    episodes = [
        minari.data_collector.EpisodeBuffer(
            observations=np.concatenate([part["obs"], part["new_obs"][-1:]]), actions=part["actions"],
            rewards=part["rewards"], terminations=part["terminateds"], truncations=part["truncateds"],
        )
        for part in batch.split_by_episode()
    ]  # fmt: skip
    dataset = minari.create_dataset_from_buffers("cartpole/expert-v0", episodes, env="CartPole-v1")
    with pytest.raises(UsageError, match="Minari has no local data set 'cartpole/other-v0'"):
        cloned("minari:cartpole/other-v0").build()
    with cloned("minari:cartpole/expert-v0").build() as algorithm:
        assert len(algorithm.data) == 3000  # type: ignore[attr-defined]
        for _ in range(10):
            algorithm.train()
        assert algorithm.evaluate()["env_runners"]["episode_return_mean"] >= 450
    with cloned(dataset).build() as algorithm:
        assert len(algorithm.data) == 3000  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["obs", "actions"])
def test_recorded_numbers_that_do_not_fit_their_space_are_refused(name: str) -> None:
    """NumPy would wrap them: 300 became 44."""

    class Small(Count):
        observation_space: Any = gym.spaces.Box(-100, 100, (2,), np.int8)
        action_space: Any = gym.spaces.Box(0, 100, (1,), np.int8)

    columns: dict[str, Any] = {
        "obs": np.full((4, 2), 7), "actions": np.full((4, 1), 3), "rewards": np.zeros(4, np.float32),
        "terminateds": np.arange(4) == 3, "truncateds": np.zeros(4, bool),
    }  # fmt: skip
    config = BCConfig().environment(lambda context: Small()).training(train_batch_size=4)
    with config.copy().offline_data(input_=SampleBatch(columns)).build() as algorithm:
        algorithm.train()
    columns[name] = columns[name] + 300
    with pytest.raises(UsageError, match="do not fit int8, the type of their space"):
        config.offline_data(input_=SampleBatch(columns)).build()
