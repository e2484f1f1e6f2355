"""Connectors of external environments: each episode has its own, and all of them share their statistics."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import Algorithm, ExternalEnv, ExternalEnvClient, Policy, PPOConfig
from rlmesh.envs.connectors import Connector, FrameStack, ObservationNormalizer, RewardClip
from rlmesh.envs.external.runner import ExternalEnvRunner

from ...own_time import HANG_S
from .test_external import SPACES, ask, obs, waiting


class Zero(Policy):
    """Takes action 0."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return np.zeros(len(obs_batch), np.int64), None, {}


def runner_of(*connectors: Connector) -> ExternalEnvRunner:
    runner = ExternalEnvRunner(ExternalEnv(*SPACES), Zero, infos=False, connectors=connectors)
    runner._clients["c"] = object()
    runner.has_weights = runner._sampling = True
    return runner


def play(runner: ExternalEnvRunner, *episodes: int, steps: int = 4, train: bool = True) -> None:
    """The steps of some episodes, in turns; the reward of a step is ten times its number."""
    for episode in episodes:
        ask(runner, "start_episode", f"e{episode}", train)
    for step in range(steps):
        for episode in episodes:
            ask(runner, "get_action", f"e{episode}", obs(episode, step))
            ask(runner, "log_returns", f"e{episode}", 10.0 * step)
    for episode in episodes:
        ask(runner, "end_episode", f"e{episode}", obs(episode, steps), False)


def test_episodes_in_turns_have_frames_of_their_own() -> None:
    runner = runner_of(FrameStack(2), RewardClip(0, 15))
    play(runner, 1, 2)
    play(runner, 3)  # with connectors that an earlier episode had
    batch = runner.sample(12)
    for episode in (1, 2, 3):
        rows = batch["obs"][batch["obs"][:, 0] == episode]
        assert rows[:, [1, 3]].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
        after = batch["new_obs"][batch["obs"][:, 0] == episode]
        assert after[:, [1, 3]].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
        assert (rows[:, [0, 2]] == episode).all()
    assert batch["rewards"].tolist() == [0, 10, 15, 15] * 3
    assert batch["env_rewards"].tolist() == [0, 10, 20, 30] * 3
    assert runner.take_stats().returns == [60, 60, 60]
    assert "env_rewards" not in batch_of(FrameStack(2))


def batch_of(*connectors: Connector) -> Any:
    runner = runner_of(*connectors)
    play(runner, 1)
    return runner.sample(4)


def test_all_episodes_share_moments_that_are_exact() -> None:
    """They are those of the observations that actions were asked for, without episodes that are not trained."""
    runner, local = runner_of(ObservationNormalizer(clip=50)), runner_of(ObservationNormalizer(clip=50))
    play(runner, 1, 2, steps=5)
    play(runner, 7, steps=9, train=False)
    runner.sample(10)
    local.connectors.merge([local.connectors.take_delta(), runner.connectors.take_delta()])
    seen = np.array([[episode, step] for episode in (1, 2) for step in range(5)], np.float64)
    (moments,) = local.connectors.shared_state()
    assert moments["count"] == 10
    np.testing.assert_allclose(moments["mean"], seen.mean(0))
    np.testing.assert_allclose(moments["squares"], ((seen - seen.mean(0)) ** 2).sum(0))
    runner._sampling = True
    runner.set_weights(local.get_weights())
    play(runner, 4)
    batch = runner.sample(4)
    rows = np.array([[4, step] for step in range(5)])
    wanted = (rows - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(batch["obs"], wanted[:4], atol=1e-4)
    np.testing.assert_allclose(batch["new_obs"], wanted[1:], atol=1e-4)
    assert sum(delta[0]["count"] for delta in runner.connectors.take_delta()) == 4


def test_a_request_without_an_answer_passes_through_connectors_once() -> None:
    runner = runner_of(FrameStack(2))
    ask(runner, "start_episode", "e", True)
    ask(runner, "get_action", "e", obs(1, 0))
    runner._sampling = False
    with ThreadPoolExecutor(2) as pool:
        first = waiting(runner, pool, "get_action", "e", 2, obs(1, 1))
        second = waiting(runner, pool, "get_action", "e", 2, obs(1, 1))
        with runner._changed:
            runner._sampling = True
            runner._changed.notify_all()
        assert second.result(HANG_S) == 0
        assert first.exception(HANG_S) is not None
    runner.call("c", "end_episode", "e", 2, obs(1, 1), False)  # the action was not carried out
    batch = runner.sample(1)
    assert batch["obs"].tolist() == [[1, 0, 1, 0]]
    assert batch["new_obs"].tolist() == [[1, 0, 1, 1]]
    assert batch["truncateds"].tolist() == [True]


def test_states_have_the_statistics_that_were_not_merged() -> None:
    runner, other = runner_of(ObservationNormalizer()), runner_of(ObservationNormalizer())
    play(runner, 1, 2)
    other.set_state(runner.get_state())
    runner.connectors.merge([runner.connectors.take_delta()])
    other.connectors.merge([other.connectors.take_delta()])
    ours, theirs = (each.connectors.shared_state()[0] for each in (runner, other))
    assert ours["count"] == theirs["count"] == 8
    assert np.array_equal(ours["squares"], theirs["squares"])


def simulate(over: threading.Event, address: str, key_file: str) -> None:
    env = gym.make("CartPole-v1")
    try:
        with ExternalEnvClient(address, key_file, timeout_s=HANG_S) as client:
            while not over.is_set():
                observation, _ = env.reset()
                episode, terminated, truncated = client.start_episode(), False, False
                while not (terminated or truncated):
                    observation, reward, terminated, truncated, _ = env.step(client.get_action(episode, observation))
                    client.log_returns(episode, float(reward))
                client.end_episode(episode, observation, truncated=truncated)
    except Exception:
        if not over.is_set():
            raise  # otherwise the job has ended in the middle of an episode


@pytest.mark.slow
def test_a_training_with_connectors_and_its_checkpoint(tmp_path: Path) -> None:
    spaces = gym.make("CartPole-v1")
    external = ExternalEnv(spaces.observation_space, spaces.action_space)
    config = PPOConfig().environment(external).training(train_batch_size=128, minibatch_size=64)
    config.env_runners(num_env_runners=1, connectors=[FrameStack(2), ObservationNormalizer()], sample_timeout_s=HANG_S)
    config.evaluation(evaluation_duration=2, evaluation_config={"env": "CartPole-v1"}).debugging(seed=0)
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with config.build() as algorithm:
            client = pool.submit(simulate, over, *algorithm.env_runner_group.connection())
            for _ in range(3):
                algorithm.train()
            moments = algorithm.env_runner.connectors.shared_state()[1]
            assert moments["count"] >= 3 * 128
            assert algorithm.get_policy().observation_space.shape == (8,)
            assert algorithm.evaluate()["env_runners"]["num_episodes"] == 2
            algorithm.save(tmp_path / "checkpoint")
            over.set()
        client.result(HANG_S)
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as algorithm:
        again = algorithm.env_runner.connectors.shared_state()[1]
        assert again["count"] == moments["count"]
        assert np.array_equal(again["squares"], moments["squares"])
