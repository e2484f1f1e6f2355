"""Ends of episodes: each autoreset mode gives the same batch, and advantages are those computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import EnvRunner, ModulePolicy, Policy, SampleBatch
from rlmesh.envs.batches.estimates import discounted_returns
from rlmesh.envs.connectors import ObservationNormalizer
from rlmesh.envs.runners.kept_episodes import EpisodeKeeper
from rlmesh.envs.runners.remote import RemoteEnvRunner
from rlmesh.errors import UsageError

from .environments import Count

GAMMA, LAMBDA = 0.9, 0.8
MODES = [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class Valued(ModulePolicy):
    """Acts by a module; the value of an observation is ``10 · episode + step + 1``."""

    def values_of(self, observations: np.ndarray, states: Any = None) -> np.ndarray:
        values: np.ndarray = 10 * observations[:, 0] + observations[:, 1] + 1
        return values.astype(np.float32)


def runner_of(mode: AutoresetMode | None, make: Callable[[], Any], size: int, **more: Any) -> EnvRunner:
    config = {"estimate_advantages": True, "gamma": GAMMA, "lambda_": LAMBDA, "seed": 1}

    def creator(context: Any) -> Any:
        return make() if mode is None else SyncVectorEnv([make] * size, autoreset_mode=mode)

    return EnvRunner(creator, Valued, policy_config=config, num_envs=size, **more)


class Golden(gym.Env[np.ndarray, Any]):
    """Given rewards, then the end; observes the number of the step, and counts resets."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, rewards: tuple[float, ...], truncates: bool) -> None:
        self.rewards, self.truncates, self.resets, self.at = rewards, truncates, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.resets, self.at = self.resets + 1, 0
        return np.array([self.resets, self.at], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = self.rewards[self.at]
        self.at += 1
        over = self.at == len(self.rewards)
        observation = np.array([self.resets, self.at], np.float32)
        return observation, reward, over and not self.truncates, over and self.truncates, {}


@pytest.mark.case("O26")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("rewards", "values", "truncates", "gamma", "lambda_", "advantages"),
    [
        ((1, 1, 1), (2, 2, 2, 2), False, 0.9, 0.95, (0.752975, -0.055, -1)),
        ((1, 1, 1), (2, 2, 2, 2), True, 0.9, 0.95, (2.06882, 1.484, 0.8)),
        ((0, 1), (0.5, 0.95, 7), False, 0.99, 0.0, (0.9405 - 0.5, 1.0 - 0.95)),
    ],
)
def test_golden_numbers_at_the_end_of_an_episode(
    mode: AutoresetMode | None, rewards: tuple[float, ...], values: tuple[float, ...], truncates: bool, gamma: float,
    lambda_: float, advantages: tuple[float, ...],
) -> None:  # fmt: skip
    class Table(ModulePolicy):
        def values_of(self, observations: np.ndarray, states: Any = None) -> np.ndarray:
            return np.take(np.array(values, np.float32), observations[:, 1].astype(int))

    envs: list[Golden] = []

    def make() -> Golden:
        envs.append(Golden(rewards, truncates))
        return envs[-1]

    def creator(context: Any) -> Any:
        return make() if mode is None else SyncVectorEnv([make] * 2, autoreset_mode=mode)

    config = {"estimate_advantages": True, "gamma": gamma, "lambda_": lambda_}
    runner = EnvRunner(creator, Table, policy_config=config, num_envs=2)
    finished = 0
    for steps in (5, 1, 14):  # the cuts between fragments are at other places of the episodes
        batch = runner.sample(2 * steps)
        finished += len(runner.take_stats())
        for part in batch.split_by_episode():
            assert (part["obs"][:, 0] == part["new_obs"][:, 0]).all()  # no step leads into the next episode
            if len(part) == len(rewards):
                np.testing.assert_allclose(part["advantages"], advantages, atol=1e-5)
    lazy = 2 if mode is AutoresetMode.NEXT_STEP else 0
    assert 2 + finished - lazy <= sum(env.resets for env in envs) <= 2 + finished


def test_an_environment_is_not_reset_twice_before_whole_episodes() -> None:
    env = Golden((1, 1), False)
    runner = EnvRunner(lambda context: env, Random)
    runner.sample(4)
    assert env.resets == 3
    batch = runner.sample(num_episodes=1)
    assert batch["obs"][:, 0].tolist() == [3, 3]  # the episode that had begun is played


def by_hand(episode: SampleBatch, is_whole: bool) -> np.ndarray:
    """Advantages of one episode, or of its part in a fragment, as a plain sum over the future."""
    value = 10 * episode["obs"][:, 0] + episode["obs"][:, 1] + 1
    after = 10 * episode["new_obs"][:, 0] + episode["new_obs"][:, 1] + 1
    after = np.where(episode["terminateds"], 0.0, after)
    deltas = episode["rewards"] + GAMMA * after - value
    size = len(deltas)
    return np.array([sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)])


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    fragments=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.integers(1, 3),
)
def test_each_autoreset_mode_bootstraps_rightly(
    lengths: list[tuple[int, bool]], fragments: list[int], size: int
) -> None:
    make = partial(Count, tuple(n for n, _ in lengths), tuple(cut for _, cut in lengths))
    for mode in MODES:
        runner = runner_of(mode, make, size)
        per_env: dict[int, list[SampleBatch]] = {}
        for steps in fragments:
            # One fragment more per reset step of NEXT_STEP would only make the batches longer; each is checked alone.
            for part in runner.sample(steps * size).split_by_episode():
                episode, first = int(part["obs"][0, 0]), int(part["obs"][0, 1])
                assert np.array_equal(part["obs"][:, 1], np.arange(first, first + len(part)))
                assert (part["obs"][:, 0] == episode).all()
                assert np.array_equal(part["t"], part["obs"][:, 1].astype(int))
                # the observation after a step is that of the same episode, also at its end
                assert np.array_equal(part["new_obs"], part["obs"] + [0, 1])
                assert np.array_equal(part["rewards"], part["new_obs"][:, 1])
                length, cut = lengths[episode % len(lengths)]
                ends = part["new_obs"][:, 1] == length
                assert np.array_equal(part["terminateds"], ends & (not cut))
                assert np.array_equal(part["truncateds"], ends & cut)
                np.testing.assert_allclose(part["advantages"], by_hand(part, bool(ends[-1])), rtol=1e-4, atol=1e-3)
                per_env.setdefault(int(part["eps_id"][0]), []).append(part)
        runner.stop()
        # parts of one episode in several fragments have one id, and follow each other
        for parts in per_env.values():
            steps_of = np.concatenate([part["t"] for part in parts])
            assert np.array_equal(steps_of, np.arange(len(steps_of)))


def test_all_modes_give_the_same_episodes() -> None:
    batches = []
    for mode in MODES:
        runner = runner_of(mode, Count, 2)
        batch = runner.sample(num_episodes=6)
        stats = runner.take_stats()
        assert sorted(stats.returns) == [3.0, 3.0, 6.0, 6.0, 15.0, 15.0]
        assert stats.env_steps == len(batch) == 20
        batches.append(batch)
    for other in batches[1:]:
        for name in ("obs", "new_obs", "rewards", "terminateds", "truncateds", "t"):
            assert np.array_equal(batches[0][name], other[name]), name


def test_whole_episodes_are_shared_evenly_so_that_short_ones_are_not_preferred() -> None:
    def creator(context: Any) -> Any:
        return Count((2,) if context.vector_index == 0 else (90,), (False,))

    runner = EnvRunner(creator, Random, num_envs=2)
    runner.sample(num_episodes=4)
    assert sorted(runner.take_stats().lengths) == [2, 2, 90, 90]


def test_returns_without_a_critic() -> None:
    rewards = np.array([[1.0], [2.0], [3.0]])
    goes_on = np.array([[True], [False], [False]])
    bootstrap = np.array([[0.0], [0.0], [10.0]])
    returns = discounted_returns(rewards, bootstrap, goes_on, 0.5)
    assert returns[:, 0].tolist() == [2.0, 2.0, 8.0]
    with pytest.raises(UsageError, match="within 0 and 1"):
        discounted_returns(rewards, bootstrap, goes_on, 1.5)


class Random(Policy):
    """Acts at random."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return self.rng.integers(0, 2, len(obs_batch)), None, {}


def test_a_broken_environment_is_made_again_alone_and_its_episode_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    made = []

    def creator(context: Any) -> Any:
        made.append(context.vector_index)
        return Count((4,), (False,), fails=(1, 2) if len(made) == 2 else None)

    runner = EnvRunner(
        creator,
        Valued,
        num_envs=3,
        seed=3,
        policy_config={"estimate_advantages": True, "gamma": GAMMA, "lambda_": LAMBDA},
    )
    Count.made.clear()
    batch = runner.sample(24)
    stats = runner.take_stats()
    assert made == [0, 1, 2, 1]
    assert "environment 1 broke and is made again" in caplog.text
    assert stats.cut == 1
    assert len(batch) == 23  # the step that broke is no row
    assert stats.lengths.count(4) == len(stats.lengths) == 5
    cut = [part for part in batch.split_by_episode() if not part["dones"][-1]]
    at = next(part for part in cut if len(part) == 2 and part["obs"][0, 0] == 1)
    # its last row is bootstrapped with the observation that the failed action was chosen for
    assert at["new_obs"][-1].tolist() == [1.0, 2.0]
    np.testing.assert_allclose(at["advantages"], by_hand(at, False), rtol=1e-4)
    seeds = [seed for seed in Count.made if seed is not None]
    assert len(set(seeds)) == 4  # each start of each environment has a seed of its own


def test_an_environment_that_breaks_always_raises_its_own_error() -> None:
    def creator(context: Any) -> Any:
        return Count(fails=(0, 0))

    with pytest.raises(RuntimeError, match="simulator crashed") as caught:
        EnvRunner(creator, Random).sample(5)
    assert "4 times without one good step" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="simulator crashed"):
        EnvRunner(creator, Random, restart_failed_sub_environments=False).sample(5)


def test_observations_and_infos_are_copied_when_they_arrive() -> None:
    runner = EnvRunner(lambda context: Count((3,), (False,), same_array=True), Random, num_envs=2)
    batch = runner.sample(12)
    assert batch["obs"][:6, 1].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["new_obs"][:6, 1].tolist() == [1, 2, 3, 1, 2, 3]
    assert [float(info["at"][0]) for info in batch["infos"][:6]] == [1, 2, 3, 1, 2, 3]


def test_environments_have_seeds_of_their_own_and_runs_repeat() -> None:
    def sampled(seed: int) -> SampleBatch:
        runner = EnvRunner("CartPole-v1", ModulePolicy, num_envs=3, seed=seed)
        return runner.sample(60)

    one = sampled(5)
    assert one == sampled(5)
    assert one != sampled(6)
    firsts = {tuple(part["obs"][0]) for part in one.split_by_episode() if part["t"][0] == 0}
    assert len(firsts) == len([part for part in one.split_by_episode() if part["t"][0] == 0])


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_gymnasiums_own_vectors(mode: str) -> None:
    runner = EnvRunner("CartPole-v1", ModulePolicy, num_envs=4, seed=0, vectorize_mode=mode)
    batch = runner.sample(400)
    assert len(batch) < 400  # the reset steps of NextStep are no rows
    for part in batch.split_by_episode():
        assert np.array_equal(part["new_obs"][:-1], part["obs"][1:])
        assert np.array_equal(part["t"], np.arange(part["t"][0], part["t"][0] + len(part)))
        assert not part["dones"][:-1].any()
    if mode == "sync":  # its one array of observations is copied before it changes
        local = EnvRunner("CartPole-v1", ModulePolicy, num_envs=4, seed=0).sample(32)
        own = np.concatenate([batch["obs"][batch["eps_id"] == episode][:8] for episode in range(4)])
        assert np.array_equal(own, local["obs"])
    runner.stop()


def test_wrong_environments_are_refused() -> None:
    class Wide(Count):
        def observe(self) -> np.ndarray:
            return np.zeros((1, 2), np.float32)

    class Doubles(Count):
        observation_space: Any = gym.spaces.Box(0, 255, (2,), np.uint8)

    class Bad(Count):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, float("nan"), *rest

    with pytest.raises(UsageError, match=r"has shape \(1, 2\), its space \(2,\)"):
        EnvRunner(lambda c: Wide(), Random).sample(1)
    with pytest.raises(UsageError, match="elements of float32, its space of uint8"):
        EnvRunner(lambda c: Doubles(), Random).sample(1)
    with pytest.raises(FloatingPointError, match="environment 0 of runner 0 returned a reward that is NaN"):
        EnvRunner(lambda c: Bad(), Random).sample(1)
    with pytest.raises(UsageError, match=r"no environment 'CartPol-v1'.*Did you mean 'CartPole-v\d'"):
        EnvRunner("CartPol-v1", Random)
    with pytest.raises(UsageError, match="returned int, which is no Gymnasium environment"):
        EnvRunner(lambda c: 3, Random)
    with pytest.raises(UsageError, match="num_steps or num_episodes"):
        EnvRunner(lambda c: Count(), Random).sample(1, num_episodes=1)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        EnvRunner(lambda c: Count(), Random).sample(0)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_observations_that_are_no_numbers_are_refused_wherever_they_stand(
    at: int, connected: bool, broken: float
) -> None:
    """Episodes have three steps: observation 0 is the first one, 3 the last one."""

    class Breaks(Count):
        def observe(self) -> np.ndarray:
            observation = super().observe()
            if self.episode == 1 and self.at == at:
                observation[1] = broken
            return observation

    connectors = [ObservationNormalizer()] if connected else []
    steps = 3 + at if at else 3  # the fragment ends with that observation
    runner = EnvRunner(lambda c: Breaks((3,), (False,)), Random, connectors=connectors)
    with pytest.raises(FloatingPointError, match=r"environment 0 of runner 0 returned .* that is NaN or infinite"):
        runner.sample(steps)
    assert len(runner.take_stats()) == 0
    if connected:
        assert np.isfinite(runner.sample(4)["obs"]).all()


def test_the_return_of_a_refused_fragment_is_not_counted() -> None:
    class Bad(Count):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, float("nan") if self.episode == 2 else reward, *rest

    runner = EnvRunner(lambda c: Bad((3,), (False,)), Random)
    runner.sample(3)
    with pytest.raises(FloatingPointError):
        runner.sample(6)
    assert runner.take_stats().returns == [6.0]


def test_final_observations_that_the_reset_overwrites_are_refused() -> None:
    def runner(mode: AutoresetMode, same_array: bool) -> EnvRunner:
        return runner_of(mode, partial(Count, (3,), (True,), None, same_array), 2)

    with pytest.raises(UsageError, match="its final observation is overwritten by the next episode's first one"):
        runner(AutoresetMode.SAME_STEP, True).sample(6)
    for mode, same_array in ((AutoresetMode.NEXT_STEP, True), (AutoresetMode.SAME_STEP, False)):
        batch = runner(mode, same_array).sample(6)
        assert batch["new_obs"][:3, 1].tolist() == [1, 2, 3]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_infos_are_those_of_the_step_and_not_of_the_reset_after_it(mode: AutoresetMode | None) -> None:
    class Tells(Count):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
            return super().reset(seed=seed)[0], {"at": -1.0, "of_reset": True}

        def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            *results, _ = super().step(action)
            return *results, {"at": float(self.at)}  # type: ignore[return-value]

    batch = runner_of(mode, Tells, 2, infos=True).sample(40)
    assert [info["at"] for info in batch["infos"]] == batch["rewards"].tolist()
    assert not any("of_reset" in info for info in batch["infos"])


def test_a_restored_vector_of_gymnasium_begins_other_episodes() -> None:
    def runner() -> EnvRunner:
        return EnvRunner("CartPole-v1", ModulePolicy, num_envs=2, seed=1, vectorize_mode="sync")

    one = runner()
    first = one.sample(40)
    starts = []
    for _ in range(2):
        other = runner()
        other.set_state(one.get_state())
        starts.append({tuple(row) for row in other.sample(40)["obs"][::20]})
        one = other
    assert not starts[0] & {tuple(row) for row in first["obs"]}
    assert not starts[0] & starts[1]


def restarted(policy: type[Policy] = ModulePolicy) -> RemoteEnvRunner:
    remote = RemoteEnvRunner()
    remote.runner = EnvRunner("CartPole-v1", policy, start=1, worker_index=1)
    remote._keeper, remote._is_back = EpisodeKeeper(remote.runner), False  # `go_on` was called
    return remote


def test_a_runner_that_restarted_samples_with_no_initial_weights() -> None:
    remote = restarted()
    with pytest.raises(UsageError, match="runner 1 was restarted and has its initial weights only"):
        remote.sample(5)
    assert remote.sample_with_stats(5, version=3) is None
    remote.set_weights(remote.get_weights(), 3)
    assert len(remote.sample(5)) == len(remote.sample_with_stats(5, version=3)[0]) == 5
    assert len(restarted(Random).sample(5)) == 5  # it has no weights


def test_weights_that_are_set_by_hand_stay() -> None:
    remote = restarted()
    remote.set_weights(remote.get_weights())  # a restarted runner
    assert remote.sample_with_stats(5, version=3) is not None
    remote.set_weights(remote.get_weights(), 3)
    remote.set_weights(remote.get_weights())  # a runner with weights of the group
    assert remote.sample_with_stats(5, version=3) is not None
    assert remote.sample_with_stats(5, version=4) is None  # the group has newer ones


def test_episodes_are_counted_once_whatever_fails() -> None:
    """Of calls that raise, no episode counts; those of earlier calls stay."""

    class Breaks(Count):
        def step(self, action: Any) -> Any:
            if self.episode == 3 and self.at == 1:
                raise RuntimeError("the simulator crashed")
            return super().step(action)

    def made() -> EnvRunner:
        runner = EnvRunner(lambda c: Breaks((2,), (False,)), Random, restart_failed_sub_environments=False)
        runner.sample(2)  # episode 0
        return runner

    for wanted in ({"num_steps": 20}, {"num_episodes": 5}):
        runner = made()
        with pytest.raises(RuntimeError, match="crashed"):
            runner.sample(**wanted)
        assert runner.take_stats().returns == [3.0]
