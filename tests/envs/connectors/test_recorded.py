"""Connectors of BC and MARWIL: recorded steps go through them, and evaluations use what they have learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.envs import Algorithm, BCConfig, MARWILConfig, SampleBatch
from rlmesh.envs.connectors import Connector, FrameStack, ObservationNormalizer, RewardClip

from ..environments import Count

LENGTHS, SIZE = (4, 3, 6), 13


def batch_of(scale: float = 1.0) -> SampleBatch:
    """Three episodes of 4, 3 and 6 steps; the second one is truncated."""
    rng, ends = np.random.default_rng(3), np.cumsum(LENGTHS) - 1
    obs = (scale * rng.normal(5.0, 3.0, (SIZE, 2))).astype(np.float32)
    new_obs = np.roll(obs, -1, 0)
    new_obs[ends] = 20.0
    terminateds, truncateds = np.zeros((2, SIZE), bool)
    terminateds[ends[[0, 2]]], truncateds[ends[1]] = True, True
    return SampleBatch(
        obs=obs, new_obs=new_obs, actions=rng.integers(2, size=SIZE), rewards=np.arange(SIZE, dtype=np.float32) - 6,
        terminateds=terminateds, truncateds=truncateds, eps_id=np.repeat(np.arange(3), LENGTHS),
    )  # fmt: skip


def built(kind: Any, connectors: list[Connector], batch: SampleBatch | None = None, **settings: Any) -> Any:
    config = kind().environment(Count).offline_data(input_=batch_of() if batch is None else batch)
    config.env_runners(connectors=connectors).debugging(seed=1)
    return config.training(train_batch_size=SIZE, **settings).build()


def stacked(values: np.ndarray, frames: int) -> np.ndarray:
    """Frames of each step of the episodes, oldest first; earlier ones are the episode's first observation."""
    rows, start = [], 0
    for length in LENGTHS:
        episode = values[start : start + length]
        rows += [np.concatenate([episode[max(0, i - k)] for k in reversed(range(frames))]) for i in range(length)]
        start += length
    return np.stack(rows)


def test_steps_are_those_that_a_policy_behind_the_connectors_gets() -> None:
    given = batch_of()
    obs = given["obs"].astype(np.float64)
    frames = stacked(obs, 2)
    mean, variance = frames.mean(0), frames.var(0)
    wanted = np.clip((frames - mean) / np.sqrt(variance + 1e-8), -10, 10)
    with built(MARWILConfig, [FrameStack(2), ObservationNormalizer(), RewardClip(-2, 2)]) as algorithm:
        data, policy = algorithm.data, algorithm.get_policy()
        assert policy.observation_space.shape == (4,)
        np.testing.assert_allclose(data.batch["obs"], wanted, atol=1e-5)
        np.testing.assert_array_equal(data.batch["rewards"], np.clip(given["rewards"], -2, 2))
        np.testing.assert_array_equal(data.batch["actions"], given["actions"])
        last = np.concatenate([obs[6], [20.0, 20.0]])  # after the truncated episode
        np.testing.assert_allclose(
            data.last_observations()[0], np.clip((last - mean) / np.sqrt(variance + 1e-8), -10, 10), atol=1e-5
        )
        value = policy.values_of(data.last_observations())
        returns = data.returns(0.9, value)
        ahead = sum(0.9**i * r for i, r in enumerate(np.clip(given["rewards"][4:7], -2, 2)))
        assert returns[4] == pytest.approx(ahead + 0.9**3 * value[0], abs=1e-5)
        moments = algorithm.env_runner.connectors.shared_state()[1]
        assert moments["count"] == SIZE
        np.testing.assert_allclose(moments["mean"], mean)


def test_evaluations_use_the_moments_of_the_recording_and_leave_them() -> None:
    with built(BCConfig, [ObservationNormalizer()]) as algorithm:
        algorithm.train()
        before = algorithm.env_runner.connectors.shared_state()
        algorithm.evaluate()
        after = algorithm._evaluation.local_env_runner.connectors.shared_state()
        assert after[0]["count"] == before[0]["count"] == SIZE
        np.testing.assert_array_equal(after[0]["mean"], batch_of()["obs"].astype(np.float64).mean(0))


@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig])
@pytest.mark.parametrize("model", [{}, {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 3}])
def test_a_restored_run_gives_the_same_numbers(kind: Any, model: dict[str, Any], tmp_path: Path) -> None:
    connectors = [FrameStack(2), ObservationNormalizer(), RewardClip(-2, 2)]
    with built(kind, connectors, model=model) as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
        algorithm.train()
        wanted = algorithm.get_weights()["default_policy"]
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as algorithm:
        algorithm.train()
        again = algorithm.get_weights()["default_policy"]
    assert wanted.keys() == again.keys()
    for name, each in wanted.items():
        np.testing.assert_array_equal(each, again[name])


def test_other_recordings_go_through_the_moments_of_the_checkpoint(tmp_path: Path) -> None:
    with built(BCConfig, [ObservationNormalizer()]) as algorithm:
        algorithm.save(tmp_path / "checkpoint")
        moments = algorithm.env_runner.connectors.shared_state()[0]
    with built(BCConfig, [ObservationNormalizer()], batch_of(2.0)) as algorithm:
        algorithm.restore(tmp_path / "checkpoint")
        obs, scale = batch_of(2.0)["obs"], np.sqrt(moments["squares"] / SIZE)
        np.testing.assert_allclose(algorithm.data.batch["obs"], (obs - moments["mean"]) / scale, rtol=1e-4, atol=1e-5)
