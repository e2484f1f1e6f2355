"""Speed of `rlmesh.envs`: python benchmarks/envs.py [--only sampling,frames,ppo,start] [--seeds 5] [--json FILE]

Medians over seeds. Sampling counts the choice of actions by the policy (64 × 64 tanh). ``ppo`` is wall time until the
mean return of the last 100 episodes of CartPole-v1 is 475. torch has one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from envs_frames import Frames

from rlmesh.envs import EnvRunner, EnvRunnerGroup, ModulePolicy, Policy, PPOConfig
from rlmesh.envs.environments.observations import ObservationRows

ZOO = {
    "train_batch_size": 256, "minibatch_size": 256, "num_epochs": 20, "lambda_": 0.8, "gamma": 0.98, "lr": 1e-3,
    "clip_param": 0.2, "vf_loss_coeff": 0.5,
}  # fmt: skip
"""Settings of Stable-Baselines3's zoo for CartPole-v1, with constant rates: 8 environments, 32 steps each."""
OWN = {
    "train_batch_size": 1024, "minibatch_size": 128, "num_epochs": 8, "lambda_": 0.9, "gamma": 0.98, "lr": 2e-3,
}  # fmt: skip
GOAL, MOST_STEPS = 475.0, 400_000
START = """
import time, torch
began = time.perf_counter()
from rlmesh.envs import PPOConfig
if __name__ == "__main__":
    with PPOConfig().environment("CartPole-v1").env_runners(num_env_runners={runners}).build() as algorithm:
        algorithm.train()
        print(time.perf_counter() - began)
"""


class RandomPolicy(Policy):
    """Acts at random, so that stepping and copying are measured alone."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return self.rng.integers(0, 4, len(obs_batch)), None, {}


def steps_per_s(sample: Callable[[int], Any], steps: int, times: int) -> float:
    """Median rate of ``sample(steps)``, after one call that is not counted."""
    sample(steps // 4)
    rates = []
    for _ in range(times):
        began = time.perf_counter()
        rates.append(len(sample(steps)) / (time.perf_counter() - began))
    return statistics.median(rates)


def rows_of(group: EnvRunnerGroup) -> Callable[[int], range]:
    """Sampling by all runners; the batches stay apart, as a learner with minibatches could take them."""
    return lambda steps: range(sum(map(len, group.sample_all(steps))))


def sampling(times: int) -> dict[str, float]:
    given: dict[str, Any] = {"infos": False, "new_obs": False, "seed": 0}
    local = EnvRunner("CartPole-v1", ModulePolicy, num_envs=16, **given)
    found = {"one process, 16 environments, steps/s": steps_per_s(local.sample, 32_000, times)}
    with EnvRunnerGroup(
        policy_class=ModulePolicy, env_creator="CartPole-v1", num_env_runners=2, num_envs=8, **given
    ) as group:
        found["2 runners, 8 environments each, steps/s"] = steps_per_s(rows_of(group), 64_000, times)
    return found


def frames(times: int) -> dict[str, float]:
    given: dict[str, Any] = {"infos": False, "new_obs": False, "seed": 0, "num_envs": 8}
    env = Frames()
    env.reset()
    began = time.perf_counter()
    for _ in range(4000):
        env.step(0)
    alone = (time.perf_counter() - began) / 4000
    local = EnvRunner(lambda context: Frames(), RandomPolicy, **given)
    rate = steps_per_s(local.sample, 4000, times)
    found = {"frames, one process, 8 environments, steps/s": rate}
    whole, rest = cpu_without_copies(local, times)
    found["frames, CPU of a step of the runner, µs"] = whole
    found["frames, its part that copies the observation, %"] = 100 * (whole - rest) / whole
    found["frames, a memcpy of an observation into a large array, µs"] = memcpy_us()
    found["frames, the environment alone, µs"] = alone * 1e6
    with EnvRunnerGroup(
        policy_class=RandomPolicy, env_creator=lambda context: Frames(), num_env_runners=2, **given
    ) as group:
        found["frames, 2 runners, 8 environments each, steps/s"] = steps_per_s(rows_of(group), 8000, times)
    return found


def cpu_without_copies(runner: EnvRunner, times: int) -> tuple[float, float]:
    """Microseconds of CPU of a step as it is, and with an ingest that checks and does not copy; medians, in turns."""

    def checks(rows: ObservationRows, out: np.ndarray, index: Any, observation: Any) -> None:
        assert observation.shape == rows.shape and observation.dtype == rows.dtype

    def one(write: Callable[..., None]) -> float:
        before, ObservationRows.write = ObservationRows.write, write  # type: ignore[method-assign]
        began = time.process_time()
        steps = len(runner.sample(4000))
        ObservationRows.write = before  # type: ignore[method-assign]
        return (time.process_time() - began) / steps * 1e6

    pairs = [(one(ObservationRows.write), one(checks)) for _ in range(2 * times)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def memcpy_us() -> float:
    """Microseconds of CPU to copy 84 × 84 × 4 bytes to ever new places of an array of 110 MB."""
    frame, out = np.zeros((84, 84, 4), np.uint8), np.ones((4000, 84, 84, 4), np.uint8)
    began = time.process_time()
    for i in range(4000):
        out[i] = frame
    return (time.process_time() - began) / 4000 * 1e6


def seconds_to_goal(training: dict[str, Any], seed: int, runners: int = 0) -> tuple[float, int]:
    config = PPOConfig().environment("CartPole-v1").training(**training).debugging(seed=seed).learners(torch_threads=1)
    with config.env_runners(num_envs_per_env_runner=8, num_env_runners=runners).build() as algorithm:
        began = time.perf_counter()
        while True:
            algorithm.train()
            window, steps = algorithm.window, algorithm.window.env_steps
            if (len(window.returns) == 100 and np.mean(window.returns) >= GOAL) or steps >= MOST_STEPS:
                reached = steps if steps < MOST_STEPS else -1
                return time.perf_counter() - began, reached


def ppo(seeds: int) -> dict[str, float]:
    found = {}
    for name, training in (("zoo's settings", ZOO), ("settings of its own", OWN)):
        runs = [seconds_to_goal(training, seed) for seed in range(seeds)]
        print(f"  PPO with {name}, each seed: " + ", ".join(f"{s:.1f} s / {n}" for s, n in runs), file=sys.stderr)
        found[f"PPO to 475, {name}, s"] = statistics.median(seconds for seconds, _ in runs)
        found[f"PPO to 475, {name}, steps"] = statistics.median(steps for _, steps in runs)
        found[f"PPO to 475, {name}, seeds that did not get there"] = sum(steps < 0 for _, steps in runs)
    return found


def start(times: int) -> dict[str, float]:
    found = {}
    for runners in (0, 2):
        program = START.format(runners=runners)
        seconds = []
        for _ in range(times):
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
            )
            seconds.append(float(done.stdout.splitlines()[0]))
        found[f"start to the first train(), {runners} runners, s beyond torch"] = statistics.median(seconds)
    return found


def main() -> None:
    parts = {"sampling": sampling, "frames": frames, "ppo": ppo, "start": start}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name in options.only.split(","):
        found |= parts[name](options.seeds)
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value:>10,.2f}" if value < 100 else f"{name:<{width}}  {value:>10,.0f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
