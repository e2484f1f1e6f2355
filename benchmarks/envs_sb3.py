"""One measurement of Stable-Baselines3: ``envs_sb3.py WHAT SEED`` prints a JSON object. Run by envs_compare.py."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

STEPS = 40_000


def sampling(seed: int) -> dict[str, Any]:
    """Steps a second, inference included, of 16 environments in this process."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CallbackList
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 16, seed=seed), n_steps=250, seed=seed, device="cpu")
    model._setup_learn(1_000_000)
    callback = CallbackList([])
    callback.init_callback(model)

    def collect() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=250)

    collect()
    began, steps = time.perf_counter(), 0
    while steps < STEPS:
        collect()
        steps += 4000
    return {"steps_per_s": steps / (time.perf_counter() - began)}


def ppo(seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, with the settings of rl-baselines3-zoo."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Stop(BaseCallback):
        reached = False

        def _on_step(self) -> bool:
            return not self.reached

        def _on_rollout_end(self) -> None:
            last = self.model.ep_info_buffer
            self.reached = len(last) == 100 and sum(each["r"] for each in last) / 100 >= 475

    began = time.perf_counter()
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98,
        n_epochs=20, ent_coef=0.0, learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2,
        seed=seed, device="cpu",
    )  # fmt: skip
    stop = Stop()
    model.learn(100_000, callback=stop)
    return {"seconds": time.perf_counter() - began, "steps": model.num_timesteps, "reached": stop.reached}


def first_result(seed: int) -> dict[str, Any]:
    """Seconds from the model to the end of the first update, after the import of torch."""
    import torch

    torch.zeros(1)
    began = time.perf_counter()
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=500, device="cpu").learn(4000)
    return {"seconds": time.perf_counter() - began}


def measure(what: str, seed: int) -> dict[str, Any]:
    if what not in ("sampling_16", "ppo_zoo", "first_1"):
        return {}
    return {"sampling_16": sampling, "ppo_zoo": ppo, "first_1": first_result}[what](seed)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
