"""Simulators outside of the job: exact rows, cut episodes, and who may connect."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import (
    DQNConfig,
    EnvRunnerGroup,
    EpisodeLost,
    ExternalEnv,
    ExternalEnvClient,
    Policy,
    PPOConfig,
    SACConfig,
    SampleBatch,
)
from rlmesh.envs.batches import columns
from rlmesh.envs.external.runner import ExternalEnvRunner
from rlmesh.envs.modules.module_policy import ModulePolicy
from rlmesh.errors import AuthenticationFailed, CallTimeout, UsageError

from ...own_time import HANG_S
from ..recurrent.tasks import MODELS, check_against_whole_episodes

SPACES = (gym.spaces.Box(-1e6, 1e6, (2,), np.float32), gym.spaces.Discrete(2))


class Alternating(Policy):
    """Takes 0, 1, 0, 1, … by the second number of the observation."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return obs_batch[:, 1].astype(np.int64) % 2, None, {}


def runner_of(policy: Any = Alternating, **settings: Any) -> ExternalEnvRunner:
    """A runner in this process with one client, ``c``."""
    runner = ExternalEnvRunner(ExternalEnv(*SPACES), policy, infos=False, **settings)
    runner._clients["c"] = object()
    runner.has_weights = runner._sampling = True
    return runner


def ask(runner: Any, method: str, name: str, *args: Any) -> Any:
    """A call with the number of its request, as `ExternalEnvClient` gives it."""
    turns = runner.__dict__.setdefault("turns", {})
    if method == "start_episode":
        turns[name] = 0
        return runner.call("c", method, name, *args)
    if method == "stop":
        return runner.call("c", method, name)
    turn = turns.get(name, 0) + 1
    answer = runner.call("c", method, name, turn, *args)
    if method.endswith("action"):
        turns[name] = turn
    return answer


def obs(episode: int, step: int) -> np.ndarray:
    return np.array([episode, step], np.float32)


def play(runner: ExternalEnvRunner, episode: int, steps: int, *, end: str = "terminated") -> None:
    """Steps with the reward of their number; without an end the last action has no result."""
    name = f"e{episode}"
    ask(runner, "start_episode", name, True)
    for step in range(steps):
        assert ask(runner, "get_action", name, obs(episode, step)) == step % 2
        ask(runner, "log_returns", name, step + 0.5)
        ask(runner, "log_returns", name, 0.5)
    if end:
        ask(runner, "end_episode", name, obs(episode, steps), end == "truncated")


def test_the_rows_are_those_of_the_episodes() -> None:
    runner = runner_of()
    play(runner, 1, 3)
    play(runner, 2, 2, end="truncated")
    batch = runner.sample(5)
    assert batch[columns.OBS].tolist() == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert batch[columns.NEW_OBS].tolist() == [[1, 1], [1, 2], [1, 3], [2, 1], [2, 2]]
    assert batch[columns.REWARDS].tolist() == [1, 2, 3, 1, 2]
    assert batch[columns.ACTIONS].tolist() == [0, 1, 0, 0, 1]
    assert batch[columns.T].tolist() == [0, 1, 2, 0, 1]
    assert batch[columns.TERMINATEDS].tolist() == [False, False, True, False, False]
    assert batch[columns.TRUNCATEDS].tolist() == [False, False, False, False, True]
    assert len(set(batch[columns.EPS_ID][:3])) == 1 != len(set(batch[columns.EPS_ID]))
    stats = runner.take_stats()
    assert (stats.returns, stats.lengths, stats.cut, stats.env_steps) == ([6, 3], [3, 2], 0, 5)


def test_an_episode_goes_on_over_batches_and_long_ones_are_whole() -> None:
    runner = runner_of()
    play(runner, 1, 150, end="")
    first = runner.sample(100)
    assert len(first) == 149  # the last action has no result yet
    runner._sampling = True
    ask(runner, "end_episode", "e1", obs(1, 150), False)
    second = runner.sample(1)
    both = np.concatenate([first[columns.OBS], second[columns.OBS]])
    assert both[:, 1].tolist() == list(range(150))
    assert np.concatenate([first[columns.NEW_OBS], second[columns.NEW_OBS]])[:, 1].tolist() == list(range(1, 151))
    assert np.concatenate([first[columns.T], second[columns.T]]).tolist() == list(range(150))
    assert set(first[columns.EPS_ID]) == set(second[columns.EPS_ID])
    assert (second[columns.TERMINATEDS].tolist(), runner.take_stats().lengths) == ([True], [150])


def test_an_episode_of_a_client_that_leaves_is_cut_once() -> None:
    runner = runner_of()
    play(runner, 1, 4, end="")
    runner._leave("c")
    runner._leave("c")
    batch = runner.sample(3)
    assert batch[columns.OBS][:, 1].tolist() == [0, 1, 2]  # the fourth step has no result
    assert not batch[columns.DONES].any()
    stats = runner.take_stats()
    assert (stats.cut, stats.returns) == (1, [])
    with pytest.raises(EpisodeLost, match="not connected to this runner any more"):
        ask(runner, "get_action", "e1", obs(1, 4))


def test_advantages_are_those_of_an_environment_in_the_runner() -> None:
    """Values, log-probabilities and advantages as `EnvRunner` computes them from the same steps."""
    config = {"estimate_advantages": True, "gamma": 0.9, "lambda_": 0.8, "model_seed": 3, "seed": 3}
    runner = runner_of(ModulePolicy, policy_config=config, new_obs=False)
    for episode, steps, end in ((1, 3, "terminated"), (2, 5, "truncated"), (3, 4, "")):
        name = f"e{episode}"
        ask(runner, "start_episode", name, True)
        for step in range(steps):
            ask(runner, "get_action", name, obs(episode, step))
            ask(runner, "log_returns", name, float(step))
        if end:
            ask(runner, "end_episode", name, obs(episode, steps), end == "truncated")
    batch = runner.sample(11)
    policy = runner.policy
    assert isinstance(policy, ModulePolicy)
    values = {(e, t): float(policy.values_of(obs(e, t)[None])[0]) for e in (1, 2, 3) for t in range(6)}
    expected: list[float] = []
    for episode, steps, bootstrap in ((1, 3, 0.0), (2, 5, values[2, 5]), (3, 3, values[3, 3])):
        following = [*(values[episode, t] for t in range(1, steps)), bootstrap]
        advantage, rows = 0.0, []
        for t in reversed(range(steps)):
            advantage = t + 0.9 * following[t] - values[episode, t] + 0.9 * 0.8 * advantage
            rows.append(advantage)
        expected += rows[::-1]
    assert batch[columns.ADVANTAGES] == pytest.approx(expected, abs=1e-4)
    inputs = batch[columns.ACTION_DIST_INPUTS]
    log_p = inputs - np.log(np.exp(inputs).sum(-1, keepdims=True))
    assert batch[columns.ACTION_LOGP] == pytest.approx(log_p[np.arange(11), batch[columns.ACTIONS]], abs=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_episodes_keep_the_state_of_a_policy_with_memory(kind: str) -> None:
    """Episodes side by side, longer than a stretch, over batches and new weights: as passes over whole episodes."""
    config = {"estimate_advantages": True, "gamma": 0.9, "lambda_": 0.0, "model_config": MODELS[kind], "seed": 3}
    runner = runner_of(ModulePolicy, policy_config=config)
    waves = {e: np.random.default_rng(e).uniform(-1, 1, (101, 2)).astype(np.float32) for e in (1, 2, 3)}
    lengths = {1: (3, "terminated"), 2: (100, "truncated"), 3: (70, "")}
    for name in ("e1", "e2", "e3"):
        ask(runner, "start_episode", name, True)
    batches = []
    for step in range(100):
        for episode, (steps, _) in lengths.items():
            if step < steps:
                ask(runner, "get_action", f"e{episode}", waves[episode][step])
                ask(runner, "log_returns", f"e{episode}", float(step))
            elif step == steps and lengths[episode][1]:
                ask(runner, "end_episode", f"e{episode}", waves[episode][steps], False)
        if step in (20, 69):
            batches.append(runner.sample(1))
            runner._sampling = True
        if step == 40:
            runner.set_weights(runner.get_weights())
    ask(runner, "end_episode", "e2", waves[2][100], True)
    batch = SampleBatch.concat_samples([*batches, runner.sample(1)])
    policy: Any = runner.policy
    assert check_against_whole_episodes(batch, policy.module) == 3 + 100 + 69


def waiting(runner: ExternalEnvRunner, pool: ThreadPoolExecutor, method: str, *args: Any) -> Any:
    """A call that waits for the learner; returns once it waits."""
    episode = runner._going_on["c", args[0]]
    before = episode.waits
    future = pool.submit(runner.call, "c", method, *args)
    settle(lambda: episode.waits is not before or future.done())
    return future


def settle(condition: Any) -> None:
    ends = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_request_that_is_repeated_is_one_step() -> None:
    """A client gave up waiting for the learner, and asks again: the step is in the batch once."""
    runner = runner_of()
    ask(runner, "start_episode", "e", True)
    assert runner.call("c", "get_action", "e", 1, obs(1, 0)) == 0
    runner.call("c", "log_returns", "e", 2, 1.0)
    runner._sampling = False
    with ThreadPoolExecutor(2) as pool:
        first = waiting(runner, pool, "get_action", "e", 2, obs(1, 1))
        second = waiting(runner, pool, "get_action", "e", 2, obs(1, 1))
        with pytest.raises(UsageError, match="a later call asks for the action"):
            first.result(HANG_S)
        with pytest.raises(UsageError, match="had no answer; repeat it first"):
            runner.call("c", "log_returns", "e", 2, 1.0)
        with pytest.raises(UsageError, match="its observation was another one"):
            runner.call("c", "get_action", "e", 2, obs(1, 7))
        with runner._changed:
            runner._sampling = True
            runner._changed.notify_all()
        assert second.result(HANG_S) == 1
    assert runner.call("c", "get_action", "e", 2, obs(1, 1)) == 1  # its answer was lost too
    runner.call("c", "log_returns", "e", 3, 2.0)
    runner.call("c", "get_action", "e", 3, obs(1, 2))
    runner.call("c", "log_action", "e", 3, obs(1, 2), 1)  # the answer came too late: the simulator did something else
    runner.call("c", "log_returns", "e", 4, 3.0)
    runner.call("c", "end_episode", "e", 4, obs(1, 3), False)
    batch = runner.sample(3)
    assert batch[columns.OBS][:, 1].tolist() == [0, 1, 2]
    assert batch[columns.REWARDS].tolist() == [1, 2, 3]
    assert batch[columns.ACTIONS].tolist() == [0, 1, 1]
    assert batch[columns.T].tolist() == [0, 1, 2]
    assert batch[columns.TERMINATEDS].tolist() == [False, False, True]
    stats = runner.take_stats()
    assert (stats.lengths, stats.returns) == ([3], [6.0])


@pytest.mark.parametrize("answered", [False, True])
def test_an_episode_that_ends_after_a_request_without_an_answer_is_truncated(answered: bool) -> None:
    runner = runner_of()
    play(runner, 1, 2, end="")
    runner.has_weights = answered  # with weights, an action is chosen that nobody carries out
    with ThreadPoolExecutor(1) as pool:
        request = waiting(runner, pool, "get_action", "e1", 3, obs(1, 2))
        if answered:
            assert request.result(HANG_S) == 0
        else:  # the last step waits for what comes after it
            assert runner.sample(1)[columns.OBS].tolist() == [[1, 0]]
        with pytest.raises(UsageError, match="its observation was another one"):
            runner.call("c", "end_episode", "e1", 3, obs(1, 9), False)
        runner.call("c", "end_episode", "e1", 3, obs(1, 2), False)
        if not answered:
            with pytest.raises(EpisodeLost):
                request.result(HANG_S)
    last = runner.sample(1)
    assert (last[columns.OBS][-1].tolist(), last[columns.NEW_OBS][-1].tolist()) == ([1, 1], [1, 2])
    assert (last[columns.TERMINATEDS].any(), last[columns.TRUNCATEDS].tolist()[-1]) == (False, True)
    stats = runner.take_stats()
    assert (stats.lengths, stats.returns) == ([2], [3.0])


def test_a_batch_that_does_not_come_in_time_keeps_its_steps() -> None:
    runner = runner_of(sample_timeout_s=0.01)
    play(runner, 1, 2)
    with pytest.raises(CallTimeout, match="runner 0 waits for external environments: 2 of 3 steps, 1 clients"):
        runner.sample(3)
    assert not runner._sampling
    assert len(runner.sample(2)) == 2


def test_an_older_stream_of_a_client_does_not_end_a_newer_one() -> None:
    async def attend_twice() -> None:
        streams = [runner.attend("x") for _ in range(2)]
        for stream in streams:
            assert await anext(stream)
        await streams[0].aclose()  # type: ignore[attr-defined]
        assert "x" in runner._clients
        await streams[1].aclose()  # type: ignore[attr-defined]
        assert "x" not in runner._clients

    runner = runner_of()
    asyncio.run(attend_twice())


def test_episodes_that_are_not_trained_and_actions_of_the_simulator() -> None:
    runner = runner_of()
    ask(runner, "start_episode", "shown", False)
    assert ask(runner, "get_action", "shown", obs(9, 1)) == 1
    ask(runner, "log_returns", "shown", 1.0)
    ask(runner, "end_episode", "shown", obs(9, 2), False)
    ask(runner, "start_episode", "own", True)
    ask(runner, "log_action", "own", obs(5, 0), 1)
    ask(runner, "log_returns", "own", 2.0)
    ask(runner, "end_episode", "own", obs(5, 1), False)
    batch = runner.sample(1)
    assert (batch[columns.OBS].tolist(), batch[columns.ACTIONS].tolist()) == ([[5, 0]], [1])
    assert runner.take_stats().returns == [2.0]


def test_wrong_calls_are_refused() -> None:
    runner = runner_of()
    ask(runner, "start_episode", "e", True)
    for call, says in (
        (("get_action", "x", obs(0, 0)), "there is no episode 'x'"),
        (("log_returns", "e", 1.0), "no action yet"),
        (("get_action", "e", np.zeros(3, np.float32)), r"shape \(3,\)"),
        (("get_action", "e", np.array([np.nan, 0], np.float32)), "NaN or infinite"),
        (("log_action", "e", obs(0, 0), 7), "not in the action space"),
        (("start_episode", "e", True), "goes on already"),
        (("stop", ""), "no method 'stop'"),
    ):
        with pytest.raises((UsageError, EpisodeLost), match=says):
            ask(runner, *call)
    ask(runner, "get_action", "e", obs(0, 0))
    with pytest.raises(UsageError, match="the reward is nan"):
        ask(runner, "log_returns", "e", float("nan"))
    with pytest.raises(UsageError, match="sampled by num_steps"):
        runner.sample(num_episodes=1)
    external = ExternalEnv(*SPACES)
    for config, says in (
        (PPOConfig().environment(external), "num_env_runners=0: external environments connect to a job"),
        (PPOConfig().environment(external).evaluation(evaluation_interval=1), 'evaluation_config={"env": …}'),
    ):
        with pytest.raises(UsageError, match=says):
            config.build()
    box = ExternalEnv(SPACES[0], gym.spaces.Box(-2, 2, (1,), np.float32))
    scaled = ExternalEnvRunner(
        box, SACConfig().environment(box).policy_class(), policy_config=SACConfig().environment(box).policy_config()
    )
    scaled._clients["c"] = object()
    scaled.has_weights = scaled._sampling = True
    ask(scaled, "start_episode", "e", True)
    with pytest.raises(UsageError, match="learns from its own only"):
        ask(scaled, "log_action", "e", obs(0, 0), np.array([1.5], np.float32))


def started(folder: Path) -> EnvRunnerGroup:
    return EnvRunnerGroup(
        policy_class=Alternating, env_creator=ExternalEnv(*SPACES), num_env_runners=1, infos=False, seed=0,
        run_dir=str(folder / "run"), sample_timeout_s=HANG_S,
    )  # fmt: skip


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvRunnerGroup]:
    with started(tmp_path_factory.mktemp("job")) as running:
        yield running


@pytest.mark.slow
def test_a_client_waits_for_the_next_batch(group: EnvRunnerGroup) -> None:
    address, key_file = group.connection()
    assert Path(key_file).stat().st_mode & 0o077 == 0
    with ThreadPoolExecutor(1) as pool, ExternalEnvClient(address, key_file, timeout_s=HANG_S) as client:
        episode = client.start_episode("mine")
        assert episode == "mine"
        first = pool.submit(client.get_action, episode, obs(1, 0))
        sampled = threading.Thread(target=lambda: batches.append(group.sample(2)))
        batches: list[Any] = []
        sampled.start()  # only now the runner acts
        assert first.result(HANG_S) == 0
        client.log_returns(episode, 3.0)
        assert client.get_action(episode, obs(1, 1)) == 1
        client.log_returns(episode, 4.0)
        client.end_episode(episode, obs(1, 2), truncated=True)
        sampled.join(HANG_S)
        (batch,) = batches
        assert batch[columns.REWARDS].tolist() == [3, 4]
        assert batch[columns.TRUNCATEDS].tolist() == [False, True]
        with pytest.raises(EpisodeLost, match="there is no episode 'mine'"):
            client.get_action(episode, obs(1, 2))
    with pytest.raises(UsageError, match="the client is closed"):
        client.start_episode()
    group.take_stats()


def test_a_simulator_that_is_killed_cuts_its_episode_once(group: EnvRunnerGroup) -> None:
    address, key_file = group.connection()
    command = [sys.executable, "-m", "tests.envs.external.simulators", "hangs", address, key_file, "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as simulator:
        batch = group.sample(3)
        assert simulator.stdout is not None
        assert simulator.stdout.readline() == "hangs\n"
        simulator.kill()
    assert batch[columns.OBS][:, 0].tolist() == [0, 1, 2]
    with ExternalEnvClient(address, key_file, timeout_s=HANG_S) as client, ThreadPoolExecutor(1) as pool:
        sampled = pool.submit(group.sample, 1)
        episode = client.start_episode()
        client.get_action(episode, obs(2, 0))
        client.end_episode(episode, obs(2, 1))
        assert sampled.result(HANG_S)[columns.OBS].tolist() == [[2, 0]]
    stats = group.take_stats()
    assert (stats.cut, len(stats.returns)) == (1, 1)


def test_nobody_connects_without_the_key(group: EnvRunnerGroup) -> None:
    address, _ = group.connection()
    with pytest.raises(AuthenticationFailed):
        ExternalEnvClient(address, key=bytes(32), timeout_s=5)
    with pytest.raises(UsageError, match="no key"):
        ExternalEnvClient(address, timeout_s=5)


@pytest.mark.slow
def test_a_client_goes_on_when_the_runner_died(tmp_path: Path) -> None:
    with started(tmp_path) as group:
        goes_on(group)


def goes_on(group: EnvRunnerGroup) -> None:
    address, key_file = group.connection()
    with ThreadPoolExecutor(1) as pool, ExternalEnvClient(address, key_file, timeout_s=HANG_S) as client:
        (pid,) = group.foreach_worker(lambda runner: os.getpid(), local_env_runner=False)
        sampled = pool.submit(group.sample, 3)
        episode = client.start_episode()
        client.get_action(episode, obs(1, 0))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EpisodeLost, match="the runner of this episode died"):
            client.log_returns(episode, 1.0)
        with pytest.raises(EpisodeLost, match="begin a new episode"):
            client.get_action(episode, obs(1, 1))
        episode = client.start_episode()
        for step in range(4):
            client.get_action(episode, obs(2, step))
        assert sampled.result(HANG_S)[columns.OBS].tolist() == [[2, 0], [2, 1], [2, 2]]
    assert group.take_stats().returns == []


@pytest.mark.slow
def test_jobs_without_external_environments_refuse_clients(tmp_path: Path) -> None:
    with EnvRunnerGroup(
        policy_class=Alternating, env_creator=lambda context: gym.make("CartPole-v1"), num_env_runners=1,
        run_dir=str(tmp_path / "run"),
    ) as other, pytest.raises(UsageError, match="is no ExternalEnv"):  # fmt: skip
        ExternalEnvClient(*other.connection(), timeout_s=HANG_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PPO", pytest.param("DQN", marks=pytest.mark.soak)])
def test_external_cartpoles_are_learnt(name: str) -> None:
    spaces = gym.make("CartPole-v1")
    config: Any = PPOConfig() if name == "PPO" else DQNConfig()
    if name == "PPO":
        config.training(train_batch_size=1024, minibatch_size=128)
    else:
        config.training(
            lr=2.3e-3, train_batch_size=64, training_intensity=32, epsilon=[[0, 1.0], [8000, 0.04]], grad_clip=10.0,
            num_steps_sampled_before_learning_starts=1000, target_network_update_freq=128,
        ).env_runners(rollout_fragment_length=256).reporting(min_env_steps_per_iteration=1024)  # fmt: skip
    config.environment(ExternalEnv(spaces.observation_space, spaces.action_space))
    config.env_runners(num_env_runners=1).debugging(seed=0).learners(torch_threads=1)
    over = threading.Event()

    def simulate(address: str, key_file: str, seed: int) -> None:
        env = gym.make("CartPole-v1")
        with ExternalEnvClient(address, key_file, timeout_s=HANG_S) as client:
            while not over.is_set():
                observation, _ = env.reset(seed=seed)
                seed += 2
                episode, terminated, truncated = client.start_episode(), False, False
                while not (terminated or truncated):
                    try:
                        action = client.get_action(episode, observation)
                    except EpisodeLost:
                        return
                    observation, reward, terminated, truncated, _ = env.step(action)
                    client.log_returns(episode, float(reward))
                client.end_episode(episode, observation, truncated=truncated)

    with ThreadPoolExecutor(2) as pool:
        with config.build() as algorithm:
            address, key_file = algorithm.env_runner_group.connection()
            simulators = [pool.submit(simulate, address, key_file, seed) for seed in range(2)]
            mean = 0.0
            for _ in range(60):
                mean = algorithm.train()["env_runners"]["episode_return_mean"]
                if mean >= 120:
                    break
            over.set()
        for simulator in simulators:
            try:
                simulator.result(HANG_S)
            except Exception:
                pass  # the job has ended in the middle of an episode
    assert mean >= 120


class Counts(Policy):
    """Its state is the number of observations so far; keeps the states before last observations."""

    ends: list[int]

    def get_initial_state(self) -> dict[str, Any]:
        return {"n": np.zeros((), np.int64)}

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return np.zeros(len(obs_batch), np.int64), {"n": state_batches["n"] + 1}, {}

    def postprocess_fragment(self, fragment: Any) -> None:
        self.ends = [int(state["n"]) for state in fragment.ended_states]


def test_an_action_that_nobody_carried_out_leaves_no_trace_in_the_state() -> None:
    runner = runner_of(Counts)
    ask(runner, "start_episode", "e", True)
    assert runner.call("c", "get_action", "e", 1, obs(1, 0)) == 0
    assert runner.call("c", "get_action", "e", 2, obs(1, 1)) == 0  # the client does not get the answer
    runner.call("c", "end_episode", "e", 2, obs(1, 1), False)
    assert runner.sample(1)[columns.TRUNCATEDS].tolist() == [True]
    assert runner.policy.ends == [1]  # type: ignore[attr-defined]
