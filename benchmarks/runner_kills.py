"""Training while runners are killed: python benchmarks/runner_kills.py [--algorithm PPO] [--seeds 5] [--json FILE]

For each seed, two runs of CartPole-v1 with 2 runners. In the first one, the runners are killed in turns (SIGKILL), one
every 5 s, for a minute. The second one is undisturbed, and has as many iterations. The program fails if a step or an
episode of a batch is there twice, or if the results count other episodes than the batches have.

A run's curve is the mean return of 10 episodes in environments of their own, every fifth iteration; its level is the
mean of the curve. The mean return that the results report is printed too. A runner that comes back goes on with the
episodes that its last batch left under way. So PPO has the numbers of the undisturbed run to the last digit, unless a
runner dies before its first batch.
The difference of the levels, killed minus undisturbed, is paired by seed; its interval is that of Student's t, 95 %.
The curve is within the noise if the interval holds 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from rlmesh.envs import IMPALA, PPO, IMPALAConfig, PPOConfig
from rlmesh.envs.algorithms.results import ResultDict
from rlmesh.envs.algorithms.train_ops import synchronous_parallel_sample, train_one_step

STEPS = 4000
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Quantiles of Student's t, by the number of seeds."""


class Seen:
    """The steps and the episodes of all batches that were sampled."""

    def __init__(self) -> None:
        self.steps: list[np.ndarray] = []
        self.ended: list[np.ndarray] = []

    def add(self, batch: Any) -> None:
        self.steps.append((batch["eps_id"] << 10) | batch["t"])  # an episode of CartPole-v1 has at most 500 steps
        self.ended.append(batch["eps_id"][batch["dones"]])

    def require_once(self, episodes: int) -> int:
        """The number of episodes that ended; an error unless ``episodes`` were reported and nothing is twice."""
        steps, ended = np.concatenate(self.steps), np.concatenate(self.ended)
        if len(np.unique(steps)) != len(steps) or len(np.unique(ended)) != len(ended):
            raise SystemExit("a step or an episode is there twice")
        if len(ended) != episodes:
            raise SystemExit(f"the results count {episodes} episodes, the batches have {len(ended)}")
        return len(ended)


class NotingPPO(PPO):
    """PPO whose batches are noted."""

    seen: Seen

    def training_step(self) -> ResultDict:
        batch = synchronous_parallel_sample(worker_set=self.env_runner_group, max_env_steps=STEPS)
        self.seen.add(batch["default_policy"])
        results = train_one_step(self, batch)
        self.env_runner_group.sync_weights()
        return results


class NotingIMPALA(IMPALA):
    """IMPALA whose fragments are noted."""

    seen: Seen

    def _sampled(self) -> Any:
        fragments = super()._sampled()
        for batch in fragments.batches:
            self.seen.add(batch)
        return fragments


def config_of(algorithm: str, seed: int) -> Any:
    """Settings with which learning takes a good part of a minute."""
    config: Any
    if algorithm == "PPO":
        config = PPOConfig(NotingPPO)
        config.training(train_batch_size=STEPS, minibatch_size=250, num_epochs=5, lr=1e-4)
    else:
        config = IMPALAConfig(NotingIMPALA).training(train_batch_size=500, lr=1e-4)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=5)
    config.evaluation(evaluation_interval=5, evaluation_duration=10, evaluation_config={"explore": True})
    return config.environment("CartPole-v1").debugging(seed=seed).reporting(min_env_steps_per_iteration=STEPS)


class Killer:
    """Kills the runners of a group in turns, one every ``every_s`` seconds, whatever they do; None: never."""

    def __init__(self, group: Any, every_s: float | None) -> None:
        self._members = [each.options(timeout_s=60, idempotent=True) for each in group.remote_workers]
        self.kills, self._done = 0, threading.Event()
        self._processes: list[int] = []
        self.look()
        self._thread = threading.Thread(target=self._work, args=(every_s,))
        if every_s is not None:
            self._thread.start()

    def look(self) -> None:
        """Opens the processes of the runners, again after a death; a number alone may be another process's later."""
        own = cloudpickle.dumps(lambda runner: __import__("os").getpid())
        before = self._processes
        self._processes = [os.pidfd_open(member.call("apply", own).result()) for member in self._members]
        for each in before:
            os.close(each)

    def _work(self, every_s: float) -> None:
        began, turn = time.monotonic(), 1
        while not self._done.wait(began + every_s * turn - time.monotonic()):
            try:
                signal.pidfd_send_signal(self._processes[turn % 2], signal.SIGKILL)
                self.kills += 1
            except OSError:
                pass  # the runner is being restarted
            turn += 1

    def stop(self) -> None:
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()


def run(algorithm: str, seed: int, *, seconds: float = 1e9, iterations: int = 10**9, every_s: float | None) -> Any:
    """Trains for so many seconds or iterations."""
    with config_of(algorithm, seed).build() as trained:
        trained.seen = Seen()
        killer = Killer(trained.env_runner_group, every_s)
        episodes, known = 0, 0
        curve: list[float] = []
        reported: list[float] = []
        began = time.monotonic()
        try:
            while len(reported) < iterations and time.monotonic() - began < seconds:
                result = trained.train()
                if killer.kills > known:
                    known = killer.kills
                    killer.look()
                episodes += result["env_runners"]["num_episodes"]
                reported.append(result["env_runners"]["episode_return_mean"])
                if "evaluation" in result:
                    curve.append(result["evaluation"]["episode_reward_mean"])
        finally:
            killer.stop()
        seconds, kills = time.monotonic() - began, killer.kills
        ended = trained.seen.require_once(episodes)
    if not curve:
        raise SystemExit("there were fewer than five iterations, so nothing was evaluated: give more --seconds")
    return {
        "kills": kills, "curve": curve, "reported": reported, "episodes": ended, "seconds": seconds,
        "level": statistics.mean(curve), "reported_level": statistics.mean(reported),
        "steps_per_s": len(reported) * STEPS / seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["PPO", "IMPALA"], default="PPO")
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11))
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run with kills")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pairs = []
    for seed in range(options.seeds):
        killed = run(options.algorithm, seed, seconds=options.seconds, every_s=options.every)
        alone = run(options.algorithm, seed, iterations=len(killed["reported"]), every_s=None)
        pairs.append((killed, alone))
        print(
            f"seed {seed}: {killed['kills']} kills, {killed['episodes']} episodes, none twice; level "
            f"{killed['level']:.1f} ({alone['level']:.1f} undisturbed), reported {killed['reported_level']:.1f} "
            f"({alone['reported_level']:.1f}), {killed['steps_per_s']:,.0f} steps/s "
            f"({alone['steps_per_s']:,.0f}); load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    differences = [killed["level"] - alone["level"] for killed, alone in pairs]
    half = T_95[options.seeds] * statistics.stdev(differences) / options.seeds**0.5
    middle = statistics.mean(differences)
    spread = statistics.stdev([alone["level"] for _, alone in pairs])
    print(
        f"difference of the levels {middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]; standard deviation of "
        f"the undisturbed levels {spread:.1f}"
    )
    for title, which in (("killed", 0), ("undisturbed", 1)):
        points = list(zip_longest(*(pair[which]["curve"] for pair in pairs)))
        means = [statistics.mean(value for value in point if value is not None) for point in points]
        shown = " ".join(f"{means[i]:.0f}" for i in range(0, len(means), max(1, len(means) // 20)))
        print(f"mean curve, {title}: {shown}")
    if options.json:
        options.json.write_text(json.dumps(pairs) + "\n")
    within = middle - half <= 0 <= middle + half
    print("within the noise" if within else "not within the noise")
    sys.exit(not within)


if __name__ == "__main__":
    main()
