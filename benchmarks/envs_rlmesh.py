"""One measurement of rlmesh.envs: ``envs_rlmesh.py WHAT SEED`` prints a JSON object. Run by envs_compare.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

STEPS = 40_000


def sampling(remote: bool, seed: int) -> dict[str, Any]:
    """Steps a second, inference included: 16 environments in this process, or 2 runners with 8 each."""
    from rlmesh.envs import PPOConfig

    config = PPOConfig().environment("CartPole-v1").debugging(seed=seed)
    if remote:
        config.env_runners(num_env_runners=2, num_envs_per_env_runner=8)
    else:
        config.env_runners(num_envs_per_env_runner=16)
    with config.build() as algorithm:
        group = algorithm.env_runner_group
        group.sample_all(num_steps=2000)
        began, steps = time.perf_counter(), 0
        while steps < STEPS:
            steps += sum(len(batch) for batch in group.sample_all(num_steps=4000))
        return {"steps_per_s": steps / (time.perf_counter() - began)}


ZOO: dict[str, Any] = {
    "train_batch_size": 8 * 32, "minibatch_size": 256, "lambda_": 0.8, "gamma": 0.98, "num_epochs": 20,
    "lr": [[0, 1e-3], [100_000, 0.0]], "clip_param": [[0, 0.2], [100_000, 0.0]], "vf_loss_coeff": 0.5, "grad_clip": 0.5,
}  # fmt: skip
"""The settings of rl-baselines3-zoo for PPO on CartPole-v1, with 8 environments."""
RLLIB: dict[str, Any] = {
    "train_batch_size": 4000, "minibatch_size": 128, "num_epochs": 30, "lr": 5e-5, "lambda_": 1.0, "clip_param": 0.3,
    "vf_loss_coeff": 1.0, "vf_clip_param": 10.0, "kl_coeff": 0.2, "grad_clip": None,
}  # fmt: skip
"""RLlib's defaults for PPO."""


def ppo(settings: str, seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, on CartPole-v1."""
    from rlmesh.envs import PPOConfig

    config = PPOConfig().environment("CartPole-v1").debugging(seed=seed)
    if settings == "zoo":
        config.env_runners(num_envs_per_env_runner=8).training(**ZOO)
    elif settings == "rllib":
        config.env_runners(num_env_runners=2, num_envs_per_env_runner=8).training(**RLLIB)
        config.rl_module(model_config={"fcnet_hiddens": (256, 256)})
    began = time.perf_counter()
    with config.build() as algorithm:
        while True:
            result = algorithm.train()
            steps, mean = result["num_env_steps_sampled_lifetime"], result["episode_reward_mean"]
            enough = result["env_runners"]["num_episodes_lifetime"] >= 100
            seconds = time.perf_counter() - began
            if (enough and mean >= 475) or steps > 500_000:
                return {"seconds": seconds, "steps": steps, "reached": bool(mean >= 475)}


def off_policy(name: str, seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of the last episodes is good, with the settings of envs_sb3.py."""
    from rlmesh.envs import get_algorithm_class

    config: Any = get_algorithm_class(name).get_default_config().debugging(seed=seed)
    uniform = {"type": "ReplayBuffer", "capacity": 100_000}
    if name == "DQN":
        goal, episodes = 195.0, 20
        config.environment("CartPole-v1").env_runners(rollout_fragment_length=256).training(
            lr=2.3e-3, train_batch_size=64, training_intensity=32, double_q=False, dueling=False, n_step=1,
            epsilon=[[0, 1.0], [8000, 0.04]], target_network_update_freq=128, grad_clip=10.0,
            num_steps_sampled_before_learning_starts=1000, replay_buffer_config=uniform,
        )  # fmt: skip
    else:
        goal, episodes = -250.0, 10
        config.environment("Pendulum-v1").training(
            lr=1e-3, train_batch_size=256, num_steps_sampled_before_learning_starts=500, replay_buffer_config=uniform
        )
        if name == "TD3":
            config.training(exploration_noise=0.1)
    config.rl_module(model_config={"fcnet_hiddens": (64, 64), "fcnet_activation": "relu"})
    config.reporting(min_env_steps_per_iteration=256, metrics_num_episodes_for_smoothing=episodes)
    began = time.perf_counter()
    with config.build() as algorithm:
        while True:
            result = algorithm.train()
            steps, mean = result["num_env_steps_sampled_lifetime"], result["episode_reward_mean"]
            enough = result["env_runners"]["num_episodes_lifetime"] >= episodes
            if (enough and mean >= goal) or steps >= 50_000:
                return {"seconds": time.perf_counter() - began, "steps": steps, "reached": bool(mean >= goal)}


IMPALA: dict[str, Any] = {
    "train_batch_size": 500, "lr": 5e-4, "grad_clip": 40.0, "vf_loss_coeff": 0.5, "entropy_coeff": 0.01,
}  # fmt: skip
"""Settings of both libraries, which are RLlib's defaults."""


def impala(seed: int) -> dict[str, Any]:
    """Steps until the mean of the last 20 episodes is 150, on CartPole-v1 with 2 runners of 5 environments."""
    from rlmesh.envs import IMPALAConfig

    config = IMPALAConfig().environment("CartPole-v1").debugging(seed=seed).training(**IMPALA)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=5, rollout_fragment_length=50)
    config.rl_module(model_config={"fcnet_hiddens": (64, 64)})
    config.reporting(metrics_num_episodes_for_smoothing=20, min_env_steps_per_iteration=2000)
    began = time.perf_counter()
    with config.build() as algorithm:
        while True:
            result = algorithm.train()
            steps, mean = result["num_env_steps_sampled_lifetime"], result["episode_reward_mean"]
            if mean >= 150 or steps > 300_000:
                return {"seconds": time.perf_counter() - began, "steps": steps, "reached": bool(mean >= 150)}


def appo(seed: int) -> dict[str, Any]:
    """Environment steps/s of APPO divided by those of PPO: 2 runners of 8 environments, each step used as often."""
    from rlmesh.envs import APPOConfig, PPOConfig

    same: dict[str, Any] = {"num_env_runners": 2, "num_envs_per_env_runner": 8, "rollout_fragment_length": 50}
    batches = {"train_batch_size": 800, "grad_clip": None}
    ahead = APPOConfig().env_runners(**same).training(**batches, circular_buffer_iterations_per_batch=2)
    waits = PPOConfig().env_runners(**{**same, "rollout_fragment_length": "auto"})
    waits.training(**batches, num_epochs=2, minibatch_size=800)
    rates = {}
    for name, config in (("appo", ahead), ("ppo", waits)):
        config.environment("CartPole-v1").debugging(seed=seed).reporting(min_env_steps_per_iteration=4000)
        with config.build() as algorithm:
            algorithm.train()
            began, steps = time.perf_counter(), 0
            while steps < STEPS:
                steps += algorithm.train()["env_runners"]["num_env_steps_sampled"]
            rates[name] = steps / (time.perf_counter() - began)
    return {"ratio": rates["appo"] / rates["ppo"], **rates}


def first_result(runners: int, seed: int) -> dict[str, Any]:
    """Seconds from the configuration to the first result, after the import of torch."""
    import torch

    torch.zeros(1)
    began = time.perf_counter()
    from rlmesh.envs import PPOConfig

    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=runners).debugging(seed=seed)
    with config.build() as algorithm:
        algorithm.train()
        return {"seconds": time.perf_counter() - began}


def replay(seed: int) -> dict[str, Any]:
    """Rounds a second with 1,000,000 transitions: add 256, sample 256 by priority, update priorities."""
    import numpy as np

    from rlmesh.envs.replay import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(1_000_000, seed=seed)
    random = np.random.default_rng(seed)

    def rows(count: int) -> dict[str, Any]:
        return {
            "obs": random.random((count, 4), np.float32), "new_obs": random.random((count, 4), np.float32),
            "actions": random.integers(0, 2, count), "rewards": random.random(count, np.float32),
            "terminateds": np.zeros(count, bool), "truncateds": np.zeros(count, bool),
        }  # fmt: skip

    for _ in range(100):
        buffer.add(rows(10_000))
    few = rows(256)
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < 3:
        buffer.add(few)
        batch = buffer.sample(256)
        buffer.update_priorities(batch["batch_indexes"], random.random(256))
        rounds += 1
    return {"rounds_per_s": rounds / (time.perf_counter() - began), "stored": len(buffer)}


def measure(what: str, seed: int) -> dict[str, Any]:
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "sampling_16": lambda: sampling(False, seed), "sampling_2x8": lambda: sampling(True, seed),
        "ppo_zoo": lambda: ppo("zoo", seed), "ppo_rllib": lambda: ppo("rllib", seed),
        "ppo_own": lambda: ppo("own", seed),
        "first_1": lambda: first_result(0, seed), "first_2": lambda: first_result(2, seed),
        "replay": lambda: replay(seed), "impala": lambda: impala(seed), "appo": lambda: appo(seed),
        **{name.lower(): partial(off_policy, name, seed) for name in ("DQN", "SAC", "TD3")},
    }  # fmt: skip
    return rows[what]()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
