"""Connectors: exact moments, stacks of frames at the edges of episodes, rewards, states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import EnvRunner, EnvRunnerGroup, Policy, PPOConfig
from rlmesh.envs.connectors import (
    Connector,
    ConnectorPipeline,
    FrameStack,
    ObservationNormalizer,
    RewardClip,
    RunningMoments,
)
from rlmesh.errors import UsageError

LENGTH = 5


class Counted(gymnasium.Env[Any, Any]):
    """Observations are [environment, episode, t]; the reward is t; episodes have 5 steps and are truncated."""

    def __init__(self, context: Any = None) -> None:
        self.observation_space = spaces.Box(-1000, 1000, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.number = 10 * context.worker_index + context.vector_index if context is not None else 0
        self.episode, self.t = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observe(), float(self.t), False, self.t == LENGTH, {}

    def observe(self) -> Any:
        return np.array([self.number, self.episode, self.t], np.float32)


class Zeros(Policy):
    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        return np.zeros(len(obs_batch), np.int64), state_batches, {}


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.integers(0, 30), min_size=1, max_size=8), shift=st.floats(-1e6, 1e6), seed=st.integers(0, 99))
def test_merged_moments_are_those_of_all_rows(parts: list[int], shift: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = [random.normal(shift, 3.0, (size, 2)) for size in parts]
    merged, at_once = RunningMoments((2,)), RunningMoments((2,))
    for part in rows:
        moments = RunningMoments((2,))
        for half in np.array_split(part, 2):
            moments.update(half)
        merged.merge(RunningMoments.of(moments.state()))
    at_once.update(np.concatenate(rows))
    together = np.concatenate(rows)
    assert merged.count == at_once.count == len(together)
    if len(together):
        assert np.allclose(merged.mean, together.mean(axis=0), rtol=1e-12, atol=1e-9)
        assert np.allclose(merged.variance, together.var(axis=0), rtol=1e-8, atol=1e-7)


def vector_of(mode: AutoresetMode | None) -> Any:
    if mode is None:
        return Counted
    return lambda context: SyncVectorEnv([Counted, Counted], autoreset_mode=mode)


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_stacks_do_not_mix_episodes_in_any_autoreset_mode(mode: AutoresetMode | None) -> None:
    runner = EnvRunner(vector_of(mode), Zeros, num_envs=2, rollout_fragment_length=13, connectors=[FrameStack(3)])
    assert runner.observation_space.shape == (9,)
    for _ in range(3):
        batch = runner.sample()
        for row in range(len(batch)):
            t, past = int(batch["t"][row]), batch["obs"][row].reshape(3, 3)
            assert past[:, 2].tolist() == [max(0, t - 2), max(0, t - 1), t]
            assert len(set(past[:, 1])) == 1
            after = batch["new_obs"][row].reshape(3, 3)
            assert after[:, 2].tolist() == [max(0, t - 1), t, t + 1]
            assert set(after[:, 1]) == set(past[:, 1])
            assert batch["truncateds"][row] == (t == LENGTH - 1)


def test_frames_of_images_are_stacked_along_the_channels() -> None:
    stack = FrameStack(2)
    assert stack.bind(spaces.Box(0, 255, (4, 5), np.uint8), 3).shape == (4, 5, 2)
    rows = np.random.default_rng(0).integers(0, 255, (3, 4, 5), np.uint8)
    assert np.array_equal(stack.observe(rows, np.ones(3, bool), learn=True), np.stack([rows, rows], -1))
    after = stack.observe(rows + 1, np.array([False, False, True]), learn=True)
    assert np.array_equal(after[:2], np.stack([rows[:2], rows[:2] + 1], -1))
    assert np.array_equal(after[2], np.stack([rows[2] + 1] * 2, -1))
    colours = FrameStack(4)
    space = colours.bind(spaces.Box(0, 255, (4, 5, 3), np.uint8), 1)
    row = np.arange(60, dtype=np.uint8).reshape(1, 4, 5, 3)
    assert space.shape == (4, 5, 12)
    assert np.array_equal(colours.observe(row, np.ones(1, bool), learn=True), np.tile(row, 4))


def test_rewards_are_clipped_for_the_policy_and_not_in_the_results() -> None:
    runner = EnvRunner(Counted, Zeros, num_envs=2, connectors=[RewardClip(0, 2)])
    batch = runner.sample(20)
    assert batch["rewards"].reshape(4, 5).tolist() == [[1, 2, 2, 2, 2]] * 4
    assert set(runner.take_stats().returns) == {15.0}
    batch, stats = runner.sample_with_stats(num_episodes=3)
    assert batch["rewards"].max() == 2
    assert stats.returns == [15.0] * 3


def test_a_fragment_is_normalised_by_the_moments_of_the_merge_before_it() -> None:
    with EnvRunnerGroup(
        policy_class=Zeros, env_creator=Counted, num_envs=3, rollout_fragment_length=20,
        connectors=[ObservationNormalizer()],
    ) as group:  # fmt: skip
        connectors = group.local_env_runner.connectors
        group.sample()
        group.sync_weights()
        for number in range(1, 4):
            (moments,) = connectors.shared_state()
            assert moments["count"] == 3 + 60 * number
            batch = group.sample()
            deviation = np.sqrt(moments["squares"] / moments["count"] + 1e-8)
            normal = (batch["t"] - moments["mean"][2]) / deviation[2]
            same = np.isclose(batch["obs"][:, 2], normal, atol=1e-5)
            assert set(np.flatnonzero(~same)) <= {0, 20, 40}  # they end the fragment before
            last = batch["truncateds"]
            assert np.allclose(batch["new_obs"][last, 2], (LENGTH - moments["mean"][2]) / deviation[2], atol=1e-5)
            group.sync_weights()


def test_a_runner_that_gave_away_what_it_saw_goes_on_with_all_of_it() -> None:
    """Runners that sample ahead: until shared moments come, a row is normalised by all rows up to it."""
    runner, rows = ObservationNormalizer(), np.random.default_rng(0).normal(100, 2, (60, 1))
    runner.bind(spaces.Box(-1e3, 1e3, (1,)), 1)
    first = np.zeros(1, bool)
    deltas = []
    for i, row in enumerate(rows):
        normal = runner.observe(row[None], first, learn=True)
        if i % 20 == 19:
            deltas.append(runner.take_delta())
        if i:
            seen = rows[: i + 1]
            assert normal[0] == pytest.approx((row - seen.mean()) / np.sqrt(seen.var() + 1e-8), abs=1e-3)
    learner = ObservationNormalizer()
    learner.bind(spaces.Box(-1e3, 1e3, (1,)), 1)
    learner.merge(deltas)
    assert learner.shared_state()["count"] == 60  # nothing is given away twice
    runner.set_shared_state(learner.shared_state())
    shared = (rows[0] - rows.mean()) / np.sqrt(rows.var() + 1e-8)
    assert runner.observe(rows[:1], first, learn=True)[0] == pytest.approx(shared, abs=1e-3)


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_observations_far_from_zero_have_mean_0(dtype: Any) -> None:
    normalizer = ObservationNormalizer()
    normalizer.bind(spaces.Box(-(2**40), 2**40, (2,), dtype), 100)
    rows = (1.7e9 + 60 + np.random.default_rng(0).normal(0, 10, (100, 2))).astype(dtype)  # such as times in seconds
    normalizer.observe(rows, np.zeros(100, bool), learn=True)
    found = normalizer.observe(rows, np.zeros(100, bool), learn=False)
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(found.std(0), 1, atol=1e-4)


def test_all_runners_have_equal_moments_of_all_that_was_seen() -> None:
    """Two remote runners: the shared moments are bitwise equal, and those of every observation of both."""
    with EnvRunnerGroup(
        policy_class=Zeros, env_creator=Counted, num_env_runners=2, num_envs=2, rollout_fragment_length=7,
        connectors=[ObservationNormalizer(clip=50)],
    ) as group:  # fmt: skip
        for _ in range(3):
            group.sample()
            group.sync_weights()
        states = group.foreach_worker(lambda runner: runner.connectors.shared_state()[0])
        for state in states[1:]:
            assert state["count"] == states[0]["count"]
            assert state["mean"].tobytes() == states[0]["mean"].tobytes()
            assert state["squares"].tobytes() == states[0]["squares"].tobytes()
        # Twins of the environments, whose observations are known: the reset, then 21 steps, reset where they end.
        rows = []
        for number in (10, 11, 20, 21):
            step = [(number, (t - 1) // LENGTH + (t % LENGTH == 0), t % LENGTH) for t in range(1, 22)]
            rows += [(number, 0, 0), *[(n, t // LENGTH, t % LENGTH) for t, (n, _, _) in enumerate(step, 1)]]
        expected = np.array(rows, float)
        assert states[0]["count"] == len(expected)
        assert np.allclose(states[0]["mean"], expected.mean(axis=0), rtol=1e-12)
        assert np.allclose(states[0]["squares"] / len(expected), expected.var(axis=0), rtol=1e-12)


def test_training_goes_on_exactly_after_a_restore(tmp_path: Path) -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=4, connectors=[FrameStack(2), ObservationNormalizer()])
        .training(train_batch_size=200, minibatch_size=100, num_epochs=2)
        .debugging(seed=3)
    )
    with config.build() as one, config.build() as other:
        one.train()
        one.save(tmp_path / "checkpoint")
        one.train()
        other.restore(tmp_path / "checkpoint")
        other.train()
        ours, theirs = one.get_weights(), other.get_weights()
        assert ours["__connectors__"][1]["mean"].tobytes() == theirs["__connectors__"][1]["mean"].tobytes()
        for name, value in ours["default_policy"].items():
            assert np.array_equal(value, theirs["default_policy"][name]), name
        before = one.env_runner.connectors.shared_state()[1]["count"]
        assert one.evaluate()["env_runners"]["num_episodes"] == 10
        assert one.env_runner.connectors.shared_state()[1]["count"] == before


def test_what_cannot_work_is_refused() -> None:
    box = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(UsageError, match="is no connector; give objects such as FrameStack"):
        ConnectorPipeline([FrameStack], box, 1)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="needs observations in a Box"):
        ConnectorPipeline([ObservationNormalizer()], spaces.Discrete(3), 1)
    with pytest.raises(UsageError, match="one to three axes"):
        ConnectorPipeline([FrameStack()], spaces.Discrete(3), 1)
    with pytest.raises(UsageError, match="no action for one"):
        ConnectorPipeline([FrameStack()], box, 1).single(np.zeros((1, 3), np.float32))
    for wrong in (lambda: FrameStack(0), lambda: RewardClip(1, 1), lambda: ObservationNormalizer(clip=0)):
        with pytest.raises(UsageError):
            wrong()
    assert not ConnectorPipeline([], box, 1)
    assert ConnectorPipeline([Connector()], box, 1).space is box


def test_images_with_their_channels_first_are_stacked_along_them() -> None:
    space = spaces.Box(0, 255, (3, 20, 20), np.uint8)
    pipeline = ConnectorPipeline([FrameStack(2)], space, 1)
    assert pipeline.space.shape == (6, 20, 20)
    one, two, three = (np.full((1, 3, 20, 20), number, np.uint8) for number in (1, 2, 3))
    pipeline.observe(one, np.ones(1, bool))
    stacked = pipeline.observe(two, np.zeros(1, bool))
    assert (stacked[0, :3] == 1).all()
    assert (stacked[0, 3:] == 2).all()
    last = pipeline.last(three[0], 0)
    assert (last[:3] == 2).all()
    assert (last[3:] == 3).all()
    assert (stacked[0, :3] == 1).all()  # in memory of its own


@pytest.mark.parametrize("shape", [(16, 16, 3), (3, 16, 16), (16, 20)])
def test_stacks_whose_channels_would_be_mistaken_are_refused(shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    with pytest.raises(UsageError, match=r"with more channels than rows, .* Stack fewer frames"):
        ConnectorPipeline([FrameStack(18)], space, 1)
    assert len(ConnectorPipeline([FrameStack(2)], space, 1).space.shape) == 3
