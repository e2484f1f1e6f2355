"""One measurement of RLlib: ``envs_rllib.py WHAT SEED`` prints a JSON object. Run by envs_compare.py."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

STEPS = 20_000
STORED = 20_000
"""Transitions in RLlib's buffer: filling 1,000,000 takes RLlib an hour, and fewer make it faster."""


def config(seed: int, runners: int = 2) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=8)
        .debugging(seed=seed, log_level="ERROR")
    )


def sampling(seed: int) -> dict[str, Any]:
    """Steps a second, inference included, of 2 runners with 8 environments each."""
    algorithm = config(seed).env_runners(rollout_fragment_length=250).build_algo()
    group = algorithm.env_runner_group
    sample = lambda runner: runner.sample(num_timesteps=2000)  # noqa: E731
    group.foreach_env_runner(sample, local_env_runner=False)
    began, steps = time.perf_counter(), 0
    while steps < STEPS:
        for episodes in group.foreach_env_runner(sample, local_env_runner=False):
            steps += sum(map(len, episodes))
    return {"steps_per_s": steps / (time.perf_counter() - began)}


def ppo(seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, at RLlib's defaults."""
    began = time.perf_counter()
    algorithm = config(seed).build_algo()
    while True:
        result = algorithm.train()
        steps = int(result["num_env_steps_sampled_lifetime"])
        mean = result["env_runners"].get("episode_return_mean", 0.0)
        if mean >= 475 or steps > 500_000:
            return {"seconds": time.perf_counter() - began, "steps": steps, "reached": bool(mean >= 475)}


def impala(seed: int) -> dict[str, Any]:
    """Steps until the mean of the last 20 episodes is 150, with the settings of envs_rlmesh.py."""
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    began = time.perf_counter()
    algorithm = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=5, rollout_fragment_length=50)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=500)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
        .reporting(metrics_num_episodes_for_smoothing=20, min_time_s_per_iteration=0)
        .debugging(seed=seed, log_level="ERROR")
        .build_algo()
    )
    while True:
        result = algorithm.train()
        steps = int(result.get("num_env_steps_sampled_lifetime", 0))
        mean = result.get("env_runners", {}).get("episode_return_mean", 0.0)
        if mean >= 150 or steps > 300_000:
            return {"seconds": time.perf_counter() - began, "steps": steps, "reached": bool(mean >= 150)}


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
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < 5:
        buffer.add(few)
        batch = buffer.sample(256, beta=0.4)
        buffer.update_priorities(batch["batch_indexes"], random.random(256))
        rounds += 1
    return {"rounds_per_s": rounds / (time.perf_counter() - began), "stored": len(buffer)}


def measure(what: str, seed: int) -> dict[str, Any]:
    known = {
        "sampling_2x8": lambda: sampling(seed), "ppo_rllib": lambda: ppo(seed), "replay": lambda: replay(seed),
        "impala": lambda: impala(seed),
        "first_1": lambda: first_result(0, seed), "first_2": lambda: first_result(2, seed),
    }  # fmt: skip
    return known[what]() if what in known else {}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
