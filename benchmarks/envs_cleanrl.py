"""One measurement of CleanRL: ``envs_cleanrl.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON.

It runs the file ``cleanrl/ppo.py`` of the installed package as it is, and watches what it prints and when it steps.
"""

from __future__ import annotations

import io
import re
import runpy
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from envs_measure import MOST_STEPS, STEPS, Rows, Way, limit, main

EPISODE = re.compile(r"global_step=(\d+), episodic_return=([\d.]+)")


class Over(Exception):
    """Ends the file of CleanRL."""


class Watch(io.StringIO):
    """A standard output that looks for episodes; CleanRL prints at most one of each step of all environments."""

    def __init__(self, seen: Callable[[int, float], None]) -> None:
        super().__init__()
        self.seen, self.rest = seen, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if found := EPISODE.match(line):
                self.seen(int(found[1]), float(found[2]))
        return len(text)


def run(seen: Callable[[int, float], None], *arguments: str) -> None:
    """Runs CleanRL's file until it ends, or until ``seen`` raises `Over`."""
    from importlib.util import find_spec

    file = find_spec("cleanrl.ppo")
    if file is None or file.origin is None:
        raise ImportError("the package cleanrl has no ppo.py")
    sys.argv, kept = [file.origin, *arguments], sys.stdout
    sys.stdout = Watch(seen)
    try:
        runpy.run_path(file.origin, run_name="__main__")
    except Over:
        pass
    finally:
        sys.stdout = kept


def ppo(seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of the last 100 printed episodes is 475, at the settings of the file."""
    last: deque[float] = deque(maxlen=100)
    out = sys.stdout
    way: Way | None = None
    limit_s = limit()  # of the arguments of this program, before those of the file take their place

    def seen(steps: int, episode: float) -> None:
        assert way is not None
        last.append(episode)
        watch, sys.stdout = sys.stdout, out  # what is told of the way goes to the real output
        over = way.ends(steps, sum(last) / len(last), len(last) == 100)
        sys.stdout = watch
        if over:
            raise Over

    import gym.vector

    make = gym.vector.SyncVectorEnv

    def begins(*arguments: Any, **named: Any) -> Any:
        nonlocal way
        way = Way(475, MOST_STEPS, limit_s=limit_s)
        return make(*arguments, **named)

    gym.vector.SyncVectorEnv = begins
    run(seen, "--seed", str(seed))
    assert way is not None
    if not way.result.get("reached") and "stopped" not in way.result:
        way.result["stopped"] = "its 500,000 steps"
    return way.result


def sampling(seed: int) -> dict[str, Any]:
    """Steps a second, inference included, of 16 environments: from the first to the last step of each rollout."""
    import gym.vector

    rollout, environments = 250, 16
    ends: list[float] = []

    class Timed(gym.vector.SyncVectorEnv):  # type: ignore[misc, name-defined, unused-ignore]
        def step(self, actions: Any) -> Any:
            found = super().step(actions)
            ends.append(time.perf_counter())
            if len(ends) >= rollout + STEPS // environments:
                raise Over
            return found

    gym.vector.SyncVectorEnv = Timed
    run(lambda steps, episode: None, "--seed", str(seed), "--num-envs", str(environments), "--num-steps", str(rollout))
    each = [ends[at : at + rollout] for at in range(rollout, len(ends), rollout)]  # the first one does not count
    steps = sum(environments * (len(one) - 1) for one in each)
    return {"steps_per_s": steps / sum(one[-1] - one[0] for one in each)}


ROWS: Rows = {"sampling_16": sampling, "ppo_cleanrl": ppo}

if __name__ == "__main__":
    main(ROWS)
