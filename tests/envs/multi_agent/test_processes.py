"""Environments of several agents in processes of their own: the same batches as in one process, and steps at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils import EzPickle

from rlmesh.envs import MultiAgentBatch, MultiAgentEnvRunner, PPOConfig
from rlmesh.envs.runners.kept_episodes import EpisodeKeeper, go_on
from rlmesh.errors import UsageError

from .environments import Anything, Convoy, Event, Fragile, Scripted, Turns, Waiting
from .test_trajectories import ALTERNATING


@contextmanager
def runner_of(creator: Any, mode: str, **more: Any) -> Iterator[MultiAgentEnvRunner]:
    runner = MultiAgentEnvRunner(creator, Anything, num_envs=2, seed=5, vectorize_mode=mode, **more)
    try:
        yield runner
    finally:
        runner.stop()


def assert_equal(one: MultiAgentBatch, other: MultiAgentBatch) -> None:
    assert one.policy_batches.keys() == other.policy_batches.keys()
    for name, part in one.policy_batches.items():
        assert part.keys() == other[name].keys()
        for column in part:
            assert np.array_equal(part[column], other[name][column]), column


def test_batches_are_those_of_one_process() -> None:
    """Over fragments, episodes, and an environment that breaks; and a restored run goes on in the middle of them."""

    def creator(context: Any) -> Any:
        return Fragile([ALTERNATING], (1, 2) if context.vector_index == 0 else None)

    with runner_of(creator, "local") as here, runner_of(creator, "async") as there:
        for steps in (3, 10, 8):
            assert_equal(here.sample(steps), there.sample(steps))
        assert here.take_stats().cut == there.take_stats().cut == 1
        state = there.get_state()
        expected = here.sample(7)
        assert_equal(expected, there.sample(7))
        there.set_state(state)
        assert_equal(expected, there.sample(7))
        assert there.foreach_env(lambda env: (type(env).__name__, os.getpid() == 0)) == [("Fragile", False)] * 2
        assert len({*there.foreach_env(lambda env: os.getpid()), os.getpid()}) == 3
        episodes = [runner.sample(num_episodes=3) for runner in (here, there)]
        assert_equal(*episodes)


class Forgetful(Scripted, EzPickle):
    """Comes back from a pickle as it was made."""

    def __init__(self) -> None:
        EzPickle.__init__(self)
        Scripted.__init__(self, [ALTERNATING])


@pytest.mark.parametrize("mode", ["local", pytest.param("async", marks=pytest.mark.slow)])
def test_the_episodes_of_a_dead_runner_go_on(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with runner_of(lambda context: Scripted([ALTERNATING]), mode) as runner:
        runner.sample(5)
        kept = EpisodeKeeper(runner).after(10.0)
        expected = runner.sample(7)
    assert kept is not None
    with runner_of(lambda context: Scripted([ALTERNATING]), "local") as new:
        go_on(new, kept, False)
        assert_equal(new.sample(7), expected)
    with runner_of(lambda context: Forgetful(), mode) as runner:
        runner.sample(5)
        assert EpisodeKeeper(runner).after(10.0) is None
        assert "envs" not in runner.get_state()
        assert "Forgetful inherits EzPickle" in caplog.text


def test_all_environments_step_at_once(tmp_path: Path) -> None:
    more = {"env_config": {"folder": str(tmp_path)}, "restart_failed_sub_environments": False}
    with runner_of(Waiting, "async", **more) as runner:
        assert runner.sample(12).env_steps() == 12


def test_a_process_that_is_killed_costs_one_episode() -> None:
    with runner_of(lambda context: Turns(), "async") as runner:
        runner.sample(4)
        first, second = runner.foreach_env(lambda env: os.getpid())
        os.kill(first, signal.SIGKILL)
        assert runner.sample(20).env_steps() == 19
        assert runner.take_stats().cut == 1
        new, same = runner.foreach_env(lambda env: os.getpid())
        assert same == second
        assert new != first
        runner.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)


def test_errors_of_environments_come_back() -> None:
    def broken(context: Any) -> Any:
        return Fragile([ALTERNATING], (0, 1))

    with (
        runner_of(broken, "async", restart_failed_sub_environments=False) as runner,
        pytest.raises(RuntimeError, match="Cracked: cracked"),
    ):
        runner.sample(4)
    script = [Event(("a",)), Event(("a",), {"a": float("nan")})]
    with (
        runner_of(lambda context: Scripted([script]), "async") as runner,
        pytest.raises(FloatingPointError, match="gave agent 'a' the reward nan"),
    ):
        runner.sample(2)
    config = PPOConfig().environment("CartPole-v1").multi_agent(policies={"a"})
    with pytest.raises(UsageError, match="has one agent"):
        config.env_runners(vectorize_mode="async").build()
    lock = __import__("threading").Lock()
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        PPOConfig().environment(lambda context: (lock, Convoy())[1]).multi_agent(policies={"a"}).env_runners(
            vectorize_mode="async"
        ).build()


def test_modes_that_do_not_exist_are_refused() -> None:
    config = PPOConfig().environment(Convoy)
    with pytest.raises(UsageError, match="environments of several agents have 'local'"):
        config.copy().env_runners(vectorize_mode="envpool").build()
    with config.copy().env_runners(vectorize_mode="sync").training(train_batch_size=32, minibatch_size=16).build() as a:
        a.train()


@pytest.mark.slow
def test_algorithms_learn_with_processes_in_remote_runners() -> None:
    config = PPOConfig().environment(Convoy).training(train_batch_size=80, minibatch_size=40, num_epochs=1)
    config.multi_agent(policies={"first", "second"})
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=2, vectorize_mode="async").debugging(seed=0)
    with config.build() as there, config.copy().env_runners(vectorize_mode="local").build() as here:
        for _ in range(2):
            assert there.train()["learners"] == here.train()["learners"]
