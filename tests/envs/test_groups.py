"""Runners in processes of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import (
    PPO,
    EnvRunner,
    EnvRunnerGroup,
    ModulePolicy,
    Policy,
    PPOConfig,
    ResultDict,
    SampleBatch,
    synchronous_parallel_sample,
    train_one_step,
)
from rlmesh.errors import PeerLost, UsageError

from ..own_time import HANG_S
from .environments import Count


class Threshold(Policy):
    """Pushes to the right where a weighted sum of the observation is positive."""

    def __init__(self, observation_space: Any, action_space: Any, config: Any) -> None:
        super().__init__(observation_space, action_space, config)
        self.weights = np.zeros(4)

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        noise = self.rng.normal(size=len(obs_batch)) * explore
        return (obs_batch @ self.weights + noise > 0).astype(np.int64), None, {"sums": obs_batch @ self.weights}

    def get_weights(self) -> Any:
        return {"weights": self.weights}

    def set_weights(self, weights: Any) -> None:
        self.weights = np.array(weights["weights"])


def weights_in(runner: EnvRunner) -> np.ndarray:
    assert isinstance(runner.policy, Threshold)
    return runner.policy.weights


def pids_of(group: EnvRunnerGroup) -> list[int]:
    return group.foreach_worker(lambda runner: os.getpid(), local_env_runner=False)


def test_a_group_without_remote_runners_starts_no_job() -> None:
    with EnvRunnerGroup(policy_class=Threshold, env_creator="CartPole-v1", num_envs=2) as group:
        assert group.remote_workers == group.remote_workers() == []
        assert group.local_worker is group.local_worker() is group.local_env_runner
        assert len(group.sample(10)) == 10
        assert group.take_stats().env_steps == 10
        assert group.foreach_worker(lambda runner: runner.num_envs) == [2]


def test_remote_runners_sample_get_weights_and_come_back(tmp_path: Path) -> None:
    number = 3
    with EnvRunnerGroup(
        policy_class=Threshold, env_creator=lambda context: gym.make("CartPole-v1"), num_env_runners=2, num_envs=number,
        seed=5, run_dir=str(tmp_path / "run"),
    ) as group:  # fmt: skip
        assert group.num_remote_workers() == len(group.remote_workers) == 2
        batch = SampleBatch.concat_samples([w.call("sample").result(HANG_S) for w in group.remote_workers()])
        assert len(batch) == 2 * 3 * 200
        assert batch["obs"].flags.writeable
        assert (
            len({tuple(row) for row in batch["obs"][batch["t"] == 0]}) == (batch["t"] == 0).sum()
        )  # no seed is there twice

        for each in group.remote_workers:  # by hand, as the document does
            each.call("set_weights", {"default_policy": {"weights": np.ones(4)}}).result(HANG_S)
        assert all((w == 1).all() for w in group.foreach_worker(weights_in, local_env_runner=False))

        batch = group.sample(60)  # with these weights, not with those of the group
        np.testing.assert_allclose(batch["sums"], batch["obs"].sum(1), rtol=1e-5, atol=1e-5)

        group.local_env_runner.policy.set_weights({"weights": np.arange(4.0)})
        group.sync_weights()
        assert all((w == np.arange(4)).all() for w in group.foreach_worker(weights_in))

        group.sample(6)
        group.begin_episodes()
        assert (group.sample(6)["t"] == 0).all()  # one step of each environment

        seen = set(group.sample(600)["eps_id"].tolist())
        before = pids_of(group)
        os.kill(before[0], signal.SIGKILL)
        batch = group.sample(600)  # waits until the runner is back, with the last weights
        np.testing.assert_allclose(batch["sums"], batch["obs"] @ np.arange(4), rtol=1e-5)
        assert len(batch) == 600
        after = pids_of(group)
        assert after[0] != before[0]
        assert after[1] == before[1]
        fresh = {int(e) for e in batch["eps_id"] if e >> 41 == 1}
        assert not fresh & seen  # the new process numbers its episodes anew
        assert group.take_stats().env_steps >= 1200
        assert len(group.sample(num_episodes=5).split_by_episode()) == 5
        with pytest.raises(UsageError, match="at least 1, not -3"):
            group.sample(-3)
    group.stop()  # a second stop does nothing


def test_training_goes_on_while_runners_die(tmp_path: Path) -> None:
    config = (
        PPOConfig()
        .environment(lambda context: Count((5,), (False,)))
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
        .training(train_batch_size=400, minibatch_size=100, num_epochs=1)
        .debugging(seed=0)
    )
    with config.build() as algorithm:
        for i in range(6):
            if i in (2, 4):
                os.kill(pids_of(algorithm.env_runner_group)[i // 2 - 1], signal.SIGKILL)
            result = algorithm.train()
            assert result["env_runners"]["num_env_steps_sampled"] == 400
            # a runner that died begins new episodes; no episode is reported twice, or in part
            assert result["env_runners"]["num_episodes"] <= 80
            assert result["env_runners"]["episode_return_mean"] == 15.0
            assert result["env_runners"]["num_episodes_lifetime"] == (i + 1) * 80
        weights = algorithm.get_weights()["default_policy"]
        for remote in algorithm.env_runner_group.foreach_worker(
            lambda r: r.policy.get_weights(), local_env_runner=False
        ):
            assert all(np.array_equal(weights[name], remote[name]) for name in weights)


@pytest.mark.slow
def test_remote_and_local_runners_learn_the_same_way() -> None:
    """The batch of two runners is that of two local runners with their numbers, row for row. Remote ones evaluate the
    network without torch, so what the network gives is equal up to rounding."""
    settings: dict[str, Any] = {"policy_class": ModulePolicy, "env_creator": "CartPole-v1", "num_envs": 2, "seed": 9}
    local = [EnvRunner("CartPole-v1", ModulePolicy, num_envs=2, seed=9, worker_index=i, num_workers=2) for i in (1, 2)]
    with EnvRunnerGroup(**settings, num_env_runners=2) as group:
        for runner in local:
            runner.set_weights(group.local_env_runner.get_weights())
        for _ in range(2):
            remote, here = group.sample(120), SampleBatch.concat_samples([runner.sample(60) for runner in local])
            assert set(remote) == set(here) and len(remote) == len(here) == 120
            for name, column in remote.items():
                if name in ("action_dist_inputs", "action_logp", "vf_preds"):
                    np.testing.assert_allclose(column, here[name], rtol=1e-5, atol=1e-6, err_msg=name)
                else:
                    np.testing.assert_array_equal(column, here[name], err_msg=name)


def test_faults_are_found_before_a_job_starts() -> None:
    class Broken(gym.Env[Any, Any]):
        def __init__(self) -> None:
            raise RuntimeError("no licence")

    with pytest.raises(RuntimeError, match="no licence"):
        EnvRunnerGroup(policy_class=Threshold, env_creator=lambda context: Broken(), num_env_runners=2)
    with pytest.raises(UsageError, match=r"num_env_runners=-1\): a whole number of at least 0"):
        EnvRunnerGroup(policy_class=Threshold, env_creator="CartPole-v1", num_env_runners=-1)


@pytest.mark.slow
def test_a_program_without_stop_ends(tmp_path: Path) -> None:
    """The job's own thread does not keep the program alive."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        from rlmesh.envs import PPOConfig

        if __name__ == "__main__":
            config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1)
            print(config.training(train_batch_size=64, minibatch_size=64).build().train()["timesteps_total"])
        """)
    )
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "64"), done.stderr


class Draws(gym.Env[np.ndarray, Any]):
    """Observes its generator's next number, and one of each generator of the process."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def observe(self) -> np.ndarray:
        return np.array([self.np_random.random(), random.random(), np.random.random(), torch.rand(()).item()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.observe(), 0.0, False, False, {}


@pytest.mark.case("O27")
@pytest.mark.slow
def test_each_environment_has_a_stream_of_its_own_and_runs_repeat() -> None:
    def streams(kill: bool) -> list[np.ndarray]:
        """The observations of the six environments, and those after a restart of the first runner."""
        settings: dict[str, Any] = {"num_envs": 3, "seed": 7, "num_env_runners": 2}
        with EnvRunnerGroup(policy_class=ModulePolicy, env_creator=lambda context: Draws(), **settings) as group:
            parts = group.sample(300).split_by_episode()
            if kill:
                os.kill(pids_of(group)[0], signal.SIGKILL)
                parts += group.sample(300).split_by_episode()[:3]
            return [part["obs"] for part in parts]

    one, two = streams(kill=False), streams(kill=True)
    assert len(one) == 6
    for a, b in zip(one, two, strict=False):
        assert np.array_equal(a, b)
    drawn = np.concatenate(two)
    assert len(two) == 9
    for column in drawn.T:
        assert len(np.unique(column)) == len(drawn)  # nothing is drawn twice, also not after the restart


@pytest.mark.slow
async def test_a_cell_of_a_notebook_starts_runners() -> None:
    """A cell runs on the thread of an event loop."""
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1)
    with config.training(train_batch_size=64, minibatch_size=64).build() as algorithm:
        assert algorithm.train()["timesteps_total"] == 64


@pytest.mark.slow
def test_a_restored_run_with_remote_runners_goes_on_exactly(tmp_path: Path) -> None:
    """Evaluation has a remote runner of its own, in a second job, and changes nothing."""
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
        .training(train_batch_size=200, minibatch_size=100, num_epochs=2)
        .debugging(seed=4)
    )
    with config.build() as whole:
        results = [whole.train(), whole.train()]
        whole.save(tmp_path / "checkpoint")
        results += [whole.train(), whole.train()]
        weights = whole.get_weights()["default_policy"]
    evaluated = config.copy().evaluation(evaluation_interval=1, evaluation_duration=2, evaluation_num_env_runners=1)
    with evaluated.build() as second:
        second.restore(tmp_path / "checkpoint")
        second.train()
        result = second.train()
        assert result["evaluation"]["env_runners"]["num_episodes"] == 2
        assert result["env_runners"] == results[-1]["env_runners"]
        again = second.get_weights()["default_policy"]
    assert all(np.array_equal(weights[name], again[name]) for name in weights)


@pytest.mark.slow
def test_a_death_beyond_the_limit_is_an_error() -> None:
    with EnvRunnerGroup(policy_class=Threshold, env_creator="CartPole-v1", num_env_runners=1, max_restarts=0) as group:
        assert len(group.sample(5)) == 5
        os.kill(pids_of(group)[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match="ENV_RUNNER"):
            group.sample(5)


class Noting(PPO):
    """Notes the episodes that end in its batches, and their rewards."""

    def training_step(self) -> ResultDict:
        batch = synchronous_parallel_sample(worker_set=self.env_runner_group, max_env_steps=1000)
        part = batch["default_policy"]
        self.ended = [*getattr(self, "ended", []), *part["eps_id"][part["dones"]].tolist()]
        results = train_one_step(self, batch)
        self.env_runner_group.sync_weights()
        return results


@pytest.mark.slow
@pytest.mark.soak
def test_runners_that_are_killed_every_five_seconds_for_a_minute() -> None:
    config = PPOConfig(Noting).environment("CartPole-v1").env_runners(num_env_runners=2, num_envs_per_env_runner=4)
    config.training(train_batch_size=1000, minibatch_size=125).debugging(seed=0)
    reported = kills = 0
    with config.build() as algorithm:
        assert isinstance(algorithm, Noting)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < 60:
            if passed > 5 * (kills + 1):
                os.kill(pids_of(algorithm.env_runner_group)[kills % 2], signal.SIGKILL)
                kills += 1
            result = algorithm.train()
            reported += result["env_runners"]["num_episodes"]
            assert result["env_runners"]["num_env_steps_sampled"] == 1000
        assert kills >= 10
        assert len(algorithm.ended) == len(set(algorithm.ended)) == reported
        assert algorithm.evaluate()["episode_reward_mean"] > 200
