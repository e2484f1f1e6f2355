"""One measurement of RLlib: ``envs_rllib.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

from envs_measure import MOST_STEPS, Rows, Way, main, rate, rounds

STORED = 20_000
"""Transitions in RLlib's buffer: filling 1,000,000 takes RLlib an hour, and fewer make it faster."""


def config(seed: int, runners: int = 2, environments: int = 8) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=environments)
        .debugging(seed=seed, log_level="ERROR")
    )


def sampling(runners: int, environments: int, frames: bool, seed: int) -> dict[str, Any]:
    """Steps a second: inference included on CartPole-v1, actions at random on frames."""
    from envs_frames import Frames

    chosen = config(seed, runners, environments).env_runners(rollout_fragment_length=250)
    algorithm = (chosen.environment(Frames) if frames else chosen).build_algo()
    each = 4000 // max(runners, 1)

    def sample(runner: Any) -> Any:
        return runner.sample(num_timesteps=each, random_actions=frames)

    def collect() -> int:
        if not runners:
            return sum(map(len, sample(algorithm.env_runner)))
        found = algorithm.env_runner_group.foreach_env_runner(sample, local_env_runner=False)
        return sum(len(episode) for episodes in found for episode in episodes)

    return rate(collect)


def sampled(*, env_runner: Any, metrics_logger: Any, samples: list[Any], **more: Any) -> None:
    """Called by RLlib's runners after each sample: the returns of ended episodes come with the result of the iteration.

    A sample has pieces of episodes; the returns of earlier pieces are kept at the runner.
    """
    if not hasattr(env_runner, "returns_so_far"):
        env_runner.returns_so_far = {}
    for piece in samples:
        total = env_runner.returns_so_far.pop(piece.id_, 0.0) + piece.get_return()
        if piece.is_done:
            metrics_logger.log_value("returns", total, reduce="item_series", window=100_000)
        else:
            env_runner.returns_so_far[piece.id_] = total


def train(algorithm: Any, way: Way, episodes: int) -> dict[str, Any]:
    """Trains until the mean of the last ``episodes`` episodes is the goal.

    RLlib's own mean is over the last ones of each result, which may be far fewer than it is asked for.
    """
    last: deque[float] = deque(maxlen=episodes)
    while True:
        result = algorithm.train()
        returns = result.get("env_runners", {}).get("returns", [])
        if isinstance(returns, list):  # not a number stands for no episode that has ended
            last.extend(returns)
        mean = sum(last) / len(last) if last else None
        if way.ends(result.get("num_env_steps_sampled_lifetime", 0), mean, len(last) == episodes):
            return way.result


def ppo(seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, at RLlib's defaults."""
    way = Way(475, MOST_STEPS)
    return train(config(seed).callbacks(on_sample_end=sampled).build_algo(), way, 100)


def impala(seed: int) -> dict[str, Any]:
    """Steps until the mean of the last 20 episodes is 150, with the settings of envs_rlmesh.py.

    Without a least number of steps, its ``train()`` returns thousands of times without a step, while the server of its
    runners' weights starts; without a time-out, it polls its runners and takes their core.
    """
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    way = Way(150, MOST_STEPS)
    algorithm = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=5, rollout_fragment_length=50)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=500, timeout_s_sampler_manager=0.1)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=500)
        .callbacks(on_sample_end=sampled)
        .debugging(seed=seed, log_level="ERROR")
        .build_algo()
    )
    return train(algorithm, way, 20)


def first_result(runners: int, seed: int) -> dict[str, Any]:
    """Seconds from the configuration to the first result, after the import of torch."""
    import torch

    torch.zeros(1)
    began = time.perf_counter()
    config(seed, runners).build_algo().train()
    return {"seconds": time.perf_counter() - began}


def replay(seed: int) -> dict[str, Any]:
    """Rounds a second: add 256, sample 256 by priority, update priorities."""
    import numpy as np
    from ray.rllib.policy.sample_batch import SampleBatch
    from ray.rllib.utils.replay_buffers.prioritized_replay_buffer import PrioritizedReplayBuffer

    random = np.random.default_rng(seed)
    buffer = PrioritizedReplayBuffer(1_000_000, storage_unit="timesteps", alpha=0.6)

    def rows(count: int) -> Any:
        return SampleBatch({
            "obs": random.random((count, 4), np.float32), "new_obs": random.random((count, 4), np.float32),
            "actions": random.integers(0, 2, count), "rewards": random.random(count, np.float32),
            "terminateds": np.zeros(count, bool), "truncateds": np.zeros(count, bool),
        })  # fmt: skip

    buffer.add(rows(STORED))
    few = rows(256)

    def one() -> None:
        buffer.add(few)
        batch = buffer.sample(256, beta=0.4)
        buffer.update_priorities(batch["batch_indexes"], random.random(256))

    return rounds(one, len(buffer), 5)


ROWS: Rows = {
    "sampling_16": partial(sampling, 0, 16, False), "sampling_2x8": partial(sampling, 2, 8, False),
    "frames_16": partial(sampling, 0, 16, True), "frames_2x8": partial(sampling, 2, 8, True),
    "ppo_rllib": ppo, "impala": impala, "replay": replay,
    "first_1": partial(first_result, 0), "first_2": partial(first_result, 2),
}  # fmt: skip

if __name__ == "__main__":
    main(ROWS)
