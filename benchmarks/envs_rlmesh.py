"""One measurement of rlmesh.envs: ``envs_rlmesh.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from envs_measure import MOST_STEPS, OFF_POLICY_STEPS, STEPS, Rows, Way, main, rate, rounds


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
        return rate(lambda: sum(len(batch) for batch in group.sample_all(num_steps=4000)))


def frames(runners: int, environments: int, seed: int) -> dict[str, Any]:
    """Steps a second of frames of 84 × 84 × 4 bytes, with actions at random."""
    from envs import RandomPolicy
    from envs_frames import Frames

    from rlmesh.envs import EnvRunner, EnvRunnerGroup

    given: dict[str, Any] = {"infos": False, "new_obs": False, "seed": seed, "num_envs": environments}
    if not runners:
        local = EnvRunner(lambda context: Frames(), RandomPolicy, **given)
        return rate(lambda: len(local.sample(4000)))
    with EnvRunnerGroup(
        policy_class=RandomPolicy, env_creator=lambda context: Frames(), num_env_runners=runners, **given
    ) as group:
        return rate(lambda: sum(len(batch) for batch in group.sample_all(num_steps=4000)))


def copies(seed: int) -> dict[str, Any]:
    """Per cent of the CPU of a step with such frames that copies the observation."""
    from envs import RandomPolicy, cpu_without_copies, memcpy_us
    from envs_frames import Frames

    from rlmesh.envs import EnvRunner

    runner = EnvRunner(lambda context: Frames(), RandomPolicy, infos=False, new_obs=False, seed=seed, num_envs=8)
    runner.sample(4000)
    whole, rest = cpu_without_copies(runner, 3)
    return {"percent": 100 * (whole - rest) / whole, "step_us": whole, "memcpy_us": memcpy_us()}


ZOO: dict[str, Any] = {
    "train_batch_size": 8 * 32, "minibatch_size": 256, "lambda_": 0.8, "gamma": 0.98, "num_epochs": 20,
    "lr": [[0, 1e-3], [100_000, 0.0]], "clip_param": [[0, 0.2], [100_000, 0.0]], "vf_loss_coeff": 0.5, "grad_clip": 0.5,
}  # fmt: skip
"""The settings of rl-baselines3-zoo for PPO on CartPole-v1, with 8 environments."""
RLLIB: dict[str, Any] = {
    "train_batch_size": 4000, "minibatch_size": 128, "num_epochs": 30, "lr": 5e-5, "lambda_": 1.0, "clip_param": 0.3,
    "vf_loss_coeff": 1.0, "vf_clip_param": 10.0, "kl_coeff": 0.2, "grad_clip": None, "adam_epsilon": 1e-8,
    "standardize_advantages": "batch",
}  # fmt: skip
"""RLlib's defaults for PPO."""
CLEANRL: dict[str, Any] = {
    "train_batch_size": 4 * 128, "minibatch_size": 128, "num_epochs": 4, "lr": [[0, 2.5e-4], [500_000, 0.0]],
    "gamma": 0.99, "lambda_": 0.95, "clip_param": 0.2, "entropy_coeff": 0.01, "vf_loss_coeff": 0.25, "grad_clip": 0.5,
}  # fmt: skip
"""The settings of CleanRL's ppo.py, with 4 environments; its loss has half of the squared error of the values.

It also clips values around their former ones, which rlmesh does not have.
"""


OWN: dict[str, Any] = {
    "train_batch_size": 1024, "minibatch_size": 128, "num_epochs": 8, "lambda_": 0.9, "gamma": 0.98, "lr": 2e-3,
}  # fmt: skip
"""Settings of our own for CartPole-v1, with 8 environments."""


def ppo(settings: str, seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, on CartPole-v1."""
    from rlmesh.envs import PPOConfig

    config = PPOConfig().environment("CartPole-v1").debugging(seed=seed)
    if settings == "zoo":
        config.env_runners(num_envs_per_env_runner=8).training(**ZOO)
    elif settings == "rllib":
        config.env_runners(num_env_runners=2, num_envs_per_env_runner=8).training(**RLLIB)
        config.rl_module(model_config={"fcnet_hiddens": (256, 256), "initializer": "torch"})
    elif settings == "cleanrl":
        config.env_runners(num_envs_per_env_runner=4).training(**CLEANRL)
    else:
        config.training(**OWN)
    way = Way(475, 100_000 if settings == "zoo" else MOST_STEPS)
    with config.build() as algorithm:
        while True:
            result = algorithm.train()
            enough = result["env_runners"]["num_episodes_lifetime"] >= 100
            if way.ends(result["num_env_steps_sampled_lifetime"], result["episode_reward_mean"], enough):
                return way.result


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
    network = {"fcnet_hiddens": (64, 64), "fcnet_activation": "relu", "initializer": "torch"}  # the peer's weights too
    config.rl_module(model_config=network)
    config.reporting(min_env_steps_per_iteration=256, metrics_num_episodes_for_smoothing=episodes)
    way = Way(goal, OFF_POLICY_STEPS)
    with config.build() as algorithm:
        while True:
            result = algorithm.train()
            enough = result["env_runners"]["num_episodes_lifetime"] >= episodes
            if way.ends(result["num_env_steps_sampled_lifetime"], result["episode_reward_mean"], enough):
                return way.result


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
    config.reporting(metrics_num_episodes_for_smoothing=20, min_env_steps_per_iteration=500)
    way = Way(150, MOST_STEPS)
    with config.build() as algorithm:
        while True:
            result = algorithm.train()
            enough = result["env_runners"]["num_episodes_lifetime"] >= 20
            if way.ends(result["num_env_steps_sampled_lifetime"], result["episode_reward_mean"], enough):
                return way.result


def appo(seed: int) -> dict[str, Any]:
    """Environment steps/s of APPO divided by those of PPO: 2 runners of 8 environments, each step used as often.

    Both take turns; the ratio is the median of five.
    """
    from rlmesh.envs import Algorithm, APPOConfig, PPOConfig

    same: dict[str, Any] = {"num_env_runners": 2, "num_envs_per_env_runner": 8, "rollout_fragment_length": 50}
    batches = {"train_batch_size": 800, "grad_clip": None}
    ahead = APPOConfig().env_runners(**same).training(**batches, circular_buffer_iterations_per_batch=2)
    waits = PPOConfig().env_runners(**{**same, "rollout_fragment_length": "auto"})
    waits.training(**batches, num_epochs=2, minibatch_size=800)
    for config in (ahead, waits):
        config.environment("CartPole-v1").debugging(seed=seed).reporting(min_env_steps_per_iteration=4000)

    def steps_per_s(algorithm: Algorithm) -> float:
        algorithm.train()  # fragments that were sampled while the other one trained are not counted
        began, steps = time.perf_counter(), 0
        while steps < STEPS:
            steps += algorithm.train()["env_runners"]["num_env_steps_sampled"]
        return steps / (time.perf_counter() - began)

    with ahead.build() as appo, waits.build() as ppo:
        pairs = [(steps_per_s(appo), steps_per_s(ppo)) for _ in range(5)]
    rates = {"appo": median(first for first, _ in pairs), "ppo": median(second for _, second in pairs)}
    return {"ratio": median(first / second for first, second in pairs), **rates}


def kills(seed: int) -> dict[str, Any]:
    """Mean return of a minute of PPO in which a runner is killed every 5 s, less that of an undisturbed run as long.

    It fails if a step or an episode is in two batches.
    """
    from runner_kills import run

    killed = run("PPO", seed, seconds=60, every_s=5)
    alone = run("PPO", seed, iterations=len(killed["reported"]), every_s=None)
    return {
        "difference": killed["level"] - alone["level"], "undisturbed": alone["level"], "kills": killed["kills"],
        "episodes": killed["episodes"],
    }  # fmt: skip


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

    def one() -> None:
        buffer.add(few)
        batch = buffer.sample(256)
        buffer.update_priorities(batch["batch_indexes"], random.random(256))

    return rounds(one, len(buffer))


ROWS: Rows = {
    "sampling_16": partial(sampling, False), "sampling_2x8": partial(sampling, True),
    "frames_16": partial(frames, 0, 16), "frames_2x8": partial(frames, 2, 8), "frames_copies": copies,
    "ppo_zoo": partial(ppo, "zoo"), "ppo_rllib": partial(ppo, "rllib"), "ppo_cleanrl": partial(ppo, "cleanrl"),
    "ppo_own": partial(ppo, "own"), "impala": impala, "appo": appo, "replay": replay,
    "kills": kills,
    "first_1": partial(first_result, 0), "first_2": partial(first_result, 2),
    **{name.lower(): partial(off_policy, name) for name in ("DQN", "SAC", "TD3")},
}  # fmt: skip

if __name__ == "__main__":
    main(ROWS)
