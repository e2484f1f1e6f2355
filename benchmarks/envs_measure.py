"""What the programs of benchmarks/envs_compare.py share: the way to a goal, rates, and how results are printed.

It runs in the environment of every library, so it imports none of them.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

Rows = dict[str, Callable[[int], dict[str, Any]]]
STEPS = 40_000
"""Steps of a measurement of sampling."""
MOST_STEPS = 500_000
"""Steps after which PPO and IMPALA give up."""
OFF_POLICY_STEPS = 195 * 256
"""The same for DQN, SAC and TD3, which look at their returns every 256 steps."""


class Way:
    """The way of a training to its goal, told once a second on standard output, so that nothing is lost by a kill.

    It ends when the goal is reached, or after ``most_steps`` steps or ``limit_s`` seconds. The result then says which.
    """

    def __init__(self, goal: float, most_steps: int, limit_s: float | None = None) -> None:
        self.goal, self.most_steps = goal, most_steps
        self.limit_s = limit() if limit_s is None else limit_s
        self.began = self._told = time.perf_counter()
        self.result: dict[str, Any] = {}

    def ends(self, steps: int, mean: float | None, enough: bool = True) -> bool:
        """Whether it ends here.

        Args:
            steps: steps in the environment so far.
            mean: mean return of the last episodes; None or NaN if there is none.
            enough: whether there are as many episodes as the mean needs.
        """
        now = time.perf_counter()
        value = None if mean is None or math.isnan(mean) else round(float(mean), 2)
        reached = enough and value is not None and float(mean or 0.0) >= self.goal
        self.result = {"seconds": now - self.began, "steps": int(steps), "mean": value, "reached": reached}
        if not reached and steps >= self.most_steps:
            self.result["stopped"] = f"{self.most_steps:,} steps"
        elif not reached and now - self.began >= self.limit_s:
            self.result["stopped"] = f"{self.limit_s:.0f} s"
        ends = reached or "stopped" in self.result
        if not ends and now - self._told >= 1:
            self._told = now
            print(json.dumps({**self.result, "partial": True}), flush=True)
        return ends


def rate(collect: Callable[[], int], steps: int = STEPS, seconds: float = 10.0) -> dict[str, Any]:
    """Steps a second of ``collect``, which returns how many it took; its first call does not count.

    It ends after ``steps`` steps, or with the first call that ends after ``seconds``.
    """
    collect()
    began, taken = time.perf_counter(), 0
    while True:
        taken += collect()
        passed = time.perf_counter() - began
        if taken >= steps or passed >= seconds:
            return {"steps_per_s": taken / passed}


def rounds(one: Callable[[], object], stored: int, seconds: float = 3.0) -> dict[str, Any]:
    """Rounds a second of ``one``."""
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        one()
        done += 1
    return {"rounds_per_s": done / (time.perf_counter() - began), "stored": stored}


def limit() -> float:
    """Seconds that this measurement may take: the third argument of the program."""
    return float(sys.argv[3]) if len(sys.argv) > 3 else math.inf


def main(rows: Rows) -> None:
    """``PROGRAM ROW SEED [LIMIT_S]``: prints the result of the row as a line of JSON."""
    what, seed = sys.argv[1], int(sys.argv[2])
    if what not in rows:
        sys.exit(f"{sys.argv[0]} has no row {what!r}, but {', '.join(rows)}")
    print(json.dumps(rows[what](seed)), flush=True)
