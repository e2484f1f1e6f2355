"""One measurement of Stable-Baselines3: ``envs_sb3.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from envs_measure import OFF_POLICY_STEPS, Rows, Way, main, rate


def sampling(seed: int) -> dict[str, Any]:
    """Steps a second, inference included, of 16 environments in this process."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CallbackList
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 16, seed=seed), n_steps=250, seed=seed, device="cpu")
    model._setup_learn(1_000_000)
    callback = CallbackList([])
    callback.init_callback(model)

    def collect() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=250)
        return 4000

    return rate(collect)


def ppo(seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, with the settings of rl-baselines3-zoo."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Stop(BaseCallback):  # type: ignore[misc]
        over = False

        def _on_step(self) -> bool:
            return not self.over

        def _on_rollout_end(self) -> None:
            last = self.model.ep_info_buffer
            mean = sum(each["r"] for each in last) / len(last) if last else None
            self.over = way.ends(self.num_timesteps, mean, len(last) == 100)

    way = Way(475, 100_000)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98,
        n_epochs=20, ent_coef=0.0, learning_rate=lambda left: left * 1e-3, clip_range=lambda left: left * 0.2,
        seed=seed, device="cpu",
    )  # fmt: skip
    model.learn(100_000, callback=Stop())
    return way.result


def off_policy(name: str, seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of the last episodes is good; looks every 256 steps."""
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    goal, episodes = (195.0, 20) if name == "DQN" else (-250.0, 10)

    class Stop(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            if self.num_timesteps % 256:
                return True
            last = list(self.model.ep_info_buffer)[-episodes:]
            mean = sum(each["r"] for each in last) / len(last) if last else None
            return not way.ends(self.num_timesteps, mean, len(last) == episodes)

    settings: dict[str, Any] = {"buffer_size": 100_000, "policy_kwargs": {"net_arch": [64, 64]}, "device": "cpu"}
    if name == "DQN":
        settings |= {
            "learning_rate": 2.3e-3, "batch_size": 64, "learning_starts": 1000, "train_freq": 256,
            "gradient_steps": 128, "target_update_interval": 10, "exploration_fraction": 8000 / 50_000,
            "exploration_final_eps": 0.04,
        }  # fmt: skip
    else:
        settings |= {"learning_rate": 1e-3, "batch_size": 256, "learning_starts": 500, "train_freq": 1}
        if name == "TD3":
            settings["action_noise"] = NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))
    env = make_vec_env("CartPole-v1" if name == "DQN" else "Pendulum-v1", 1, seed=seed)
    way = Way(goal, OFF_POLICY_STEPS)
    model = getattr(stable_baselines3, name)("MlpPolicy", env, seed=seed, **settings)
    model.learn(50_000, callback=Stop())
    return way.result


def first_result(seed: int) -> dict[str, Any]:
    """Seconds from the model to the end of the first update, after the import of torch."""
    import torch

    torch.zeros(1)
    began = time.perf_counter()
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), n_steps=500, device="cpu").learn(4000)
    return {"seconds": time.perf_counter() - began}


ROWS: Rows = {
    "sampling_16": sampling, "ppo_zoo": ppo, "first_1": first_result,
    **{name.lower(): partial(off_policy, name) for name in ("DQN", "SAC", "TD3")},
}  # fmt: skip

if __name__ == "__main__":
    main(ROWS)
