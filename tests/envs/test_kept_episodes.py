"""Episodes under way when a remote runner dies."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from rlmesh.envs import (
    PPO,
    EnvRunner,
    EnvRunnerGroup,
    ModulePolicy,
    PPOConfig,
    ResultDict,
    SampleBatch,
    synchronous_parallel_sample,
    train_one_step,
)
from rlmesh.envs.connectors import FrameStack, ObservationNormalizer
from rlmesh.envs.environments.pickling import EnvironmentPickler
from rlmesh.envs.runners import kept_episodes
from rlmesh.envs.runners.async_sampler import AsyncSampler
from rlmesh.envs.runners.kept_episodes import EpisodeKeeper, go_on

from ..own_time import HANG_S
from .environments import Count


def pids_of(group: EnvRunnerGroup) -> list[int]:
    pids: list[int] = group.foreach_worker(lambda runner: os.getpid(), local_env_runner=False)
    return pids


class Killed(PPO):
    """PPO whose runners are killed.

    Attributes:
        kills: by iteration: the runner, and False before it samples, True before its statistics are merged.
    """

    kills: dict[int, tuple[int, bool]]
    pids: list[int]

    def training_step(self) -> ResultDict:
        runner, late = self.kills.get(self.iteration, (None, False))
        if runner is not None and not late:
            os.kill(self.pids[runner], signal.SIGKILL)
        batch = synchronous_parallel_sample(worker_set=self.env_runner_group, max_env_steps=400)
        if runner is not None and late:
            os.kill(self.pids[runner], signal.SIGKILL)
        results = train_one_step(self, batch)
        self.env_runner_group.sync_weights()
        return results


def trained(kills: dict[int, tuple[int, bool]]) -> tuple[list[Any], Any, Any]:
    """Results, weights and moments of five iterations."""
    config = PPOConfig(Killed).environment("CartPole-v1").debugging(seed=11)
    connectors = [ObservationNormalizer(), FrameStack(2)]
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=2, connectors=connectors)
    config.training(train_batch_size=400, minibatch_size=100, num_epochs=2)
    with config.build() as algorithm:
        assert isinstance(algorithm, Killed)
        algorithm.kills, algorithm.pids = kills, pids_of(algorithm.env_runner_group)
        results = [algorithm.train()["env_runners"] for _ in range(5)]
        moments = algorithm.env_runner.connectors.shared_state()[0]
        return results, algorithm.get_weights()["default_policy"], moments


def test_a_run_with_kills_gives_the_numbers_of_an_undisturbed_one() -> None:
    results, weights, moments = trained({})
    again, others, same_moments = trained({2: (0, False), 3: (1, True)})
    assert again == results
    assert all(np.array_equal(weights[name], others[name]) for name in weights)
    assert moments["count"] == same_moments["count"]
    np.testing.assert_array_equal(moments["mean"], same_moments["mean"])


def test_runners_that_sample_ahead_go_on_with_their_episodes() -> None:
    length = 50
    with EnvRunnerGroup(
        policy_class=ModulePolicy, env_creator=lambda context: Count((length,), (False,)), num_env_runners=2,
        num_envs=2, seed=3, infos=False,
    ) as group:  # fmt: skip
        pids, sampler = pids_of(group), AsyncSampler(group, 40, 2)
        parts: list[SampleBatch] = []

        def rows_of(runner: int) -> int:
            return sum(int((each["eps_id"] >> 41 == runner).sum()) for each in parts)

        for killed in (None, 1, 2):
            wanted = rows_of(killed or 1) + 300
            if killed is not None:
                os.kill(pids[killed - 1], signal.SIGKILL)
            deadline = time.monotonic() + HANG_S
            while rows_of(killed or 1) < wanted:
                parts.append(sampler.take(80).joined())
                assert time.monotonic() < deadline
        sampler.stop()
    rows = SampleBatch.concat_samples(parts)
    steps: dict[int, list[int]] = {}
    for episode, t in zip(rows["eps_id"].tolist(), rows["t"].tolist(), strict=True):
        steps.setdefault(episode, []).append(t)
    assert all(each == list(range(len(each))) for each in steps.values())  # each step once, in its order
    assert sum(len(each) < length for each in steps.values()) <= 4  # one of each environment is under way
    assert sum(rows["terminateds"]) >= 12


def test_a_caller_who_samples_a_runner_by_hand_gets_no_step_again() -> None:
    with EnvRunnerGroup(
        policy_class=ModulePolicy, env_creator=lambda context: Count((50,), (False,)), num_env_runners=1, seed=3,
    ) as group:  # fmt: skip
        (pid,) = pids_of(group)
        parts = [group.sample(20)]
        (remote,) = group.remote_workers
        parts.append(remote.call("sample", 20).result(60))
        parts.append(group.sample(20))
        parts.append(remote.call("sample", 20).result(60))
        os.kill(pid, signal.SIGKILL)
        parts.append(group.sample(20))
        rows = SampleBatch.concat_samples(parts)
        steps = set(zip(rows["eps_id"].tolist(), rows["t"].tolist(), strict=True))
        assert len(steps) == len(rows) == 100


def runner_of(env: Any, **more: Any) -> EnvRunner:
    return EnvRunner(lambda context: env(), ModulePolicy, num_envs=2, seed=1, infos=False, **more)


def test_a_state_keeps_statistics_of_connectors_that_nobody_took() -> None:
    for taken in (False, True):
        runner, new = (runner_of(Count, connectors=[ObservationNormalizer()]) for _ in range(2))
        runner.sample(20)
        kept = EpisodeKeeper(runner).after(1.0)
        assert kept is not None
        go_on(new, kept, taken)
        assert new.connectors.take_delta()[0]["count"] == (0 if taken else 22)
        assert np.array_equal(new.sample(10)["obs"], runner.sample(10)["obs"])


class Forgets(Count, EzPickle):
    """Comes back from a pickle as it was made."""

    def __init__(self) -> None:
        EzPickle.__init__(self)
        Count.__init__(self)


class Remembers(Forgets):
    """Pickles all that it is."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_environments_that_come_back_without_their_episode_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    for env in (Forgets, lambda: gym.wrappers.TimeLimit(Forgets(), 9)):
        runner = runner_of(env)
        runner.sample(8)
        assert "envs" not in runner.get_state()
        assert "Forgets inherits EzPickle: only the arguments of its constructor are pickled" in caplog.text
        assert EpisodeKeeper(runner).after(1.0) is None
        caplog.clear()
    runner, new = runner_of(Remembers), runner_of(Remembers)
    runner.sample(8)
    new.set_state(runner.get_state())
    assert np.array_equal(new.sample(10)["obs"], runner.sample(10)["obs"])


def test_what_is_large_or_slow_to_pickle_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pickle.PicklingError, match="more than 1,000 bytes"):
        EnvironmentPickler(1000)([np.zeros(1000)])
    runner = runner_of(Count)
    runner.sample(8)
    keeper = EpisodeKeeper(runner)
    assert keeper.after(0.0) is not None
    monkeypatch.setattr(kept_episodes, "FREE_S", 0.0)
    assert keeper.after(1e-6) is None  # for now
    assert keeper.after(10.0) is not None
    monkeypatch.setattr(kept_episodes, "MOST_BYTES", 100)
    keeper = EpisodeKeeper(runner)
    assert keeper.after(10.0) is None
    keeper.stop()
    assert keeper.after(10.0) is None


def test_what_is_pickled_while_others_have_the_core_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(Count)
    runner.sample(8)
    pickled = runner.get_state

    def late(**more: Any) -> Any:
        time.sleep(0.1)
        return pickled(**more)

    monkeypatch.setattr(runner, "get_state", late)
    keeper = EpisodeKeeper(runner)
    assert all(keeper.after(0.0) is not None for _ in range(3))


@pytest.mark.parametrize("local", [False, True])
def test_the_second_pickle_of_the_same_classes_has_the_same_content(local: bool) -> None:
    class Local(Count):
        """Only cloudpickle pickles it."""

    pickler = EnvironmentPickler()
    env: Any = gym.wrappers.TimeLimit((Local if local else Count)((9,), (False,)), 20)
    env.reset(seed=1)
    for at in (1, 2, 3):
        env.step(0)
        again = cloudpickle.loads(pickler([env]))[0]
        assert again.unwrapped.at == at
        assert again.step(1)[1] == at + 1


def test_a_state_that_cannot_be_read_begins_new_episodes(caplog: pytest.LogCaptureFixture) -> None:
    runner, new = runner_of(Count), runner_of(Count)
    runner.sample(7)
    state = {**runner.get_state(), "envs": b"no pickle"}
    go_on(new, pickle.dumps(state), False)
    assert "new ones begin" in caplog.text
    assert (new.sample(2)["t"] == 0).all()
