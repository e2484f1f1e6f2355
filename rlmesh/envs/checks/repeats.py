"""Checks that compare runs: determinism under one seed, and resources that stay after close()."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rlmesh.envs.checks.calls import WatchedEnv
from rlmesh.envs.checks.episodes import CheckPlan, Watched, actions_of
from rlmesh.envs.checks.findings import FindingList
from rlmesh.envs.checks.recordings import TracedStep, first_difference_of
from rlmesh.envs.checks.values import ended

__all__ = ["check_determinism", "check_resources", "report_difference", "trace"]

CYCLES = 4
SEVERAL_RESETS = 6


def trace(watched: WatchedEnv, plan: CheckPlan) -> list[TracedStep]:
    """Everything that the environment returns for the plan's seed and random actions, over several episodes."""
    actions, steps, over = actions_of(watched.env, plan.seed), [], True
    for number in range(plan.steps):
        if over:
            observation, _ = watched.reset(**({"seed": plan.seed} if number == 0 else {}))
            steps.append(TracedStep.of(watched.where, observation))
            over = False
        else:
            observation, reward, terminated, truncated, _ = watched.step(next(actions))
            steps.append(TracedStep.of(watched.where, observation, reward, terminated, truncated))
            flags = [ended(each) if isinstance(each, Mapping) else np.asarray(each) for each in (terminated, truncated)]
            mask = np.asarray(flags[0] | flags[1])
            over = mask.ndim == 0 and bool(mask)  # A vector environment resets its parts itself, except in one mode.
            if mask.ndim and mask.any() and watched.env.metadata.get("autoreset_mode") is AutoresetMode.DISABLED:
                watched.reset(options={"reset_mask": mask})
    return steps


def report_difference(
    findings: FindingList, one: list[TracedStep], other: list[TracedStep], who: str, advice: str
) -> bool:
    """Report the first step that differs; True if there is one."""
    different = first_difference_of(one, other)
    if different is None:
        return False
    findings.add(
        "determinism", different[0].label, f"{who}: {different[0].text}, then {different[1].text}", advice, kind="any"
    )
    return True


def check_determinism(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> list[TracedStep]:
    """Play the same seed and actions in two environments, and again in the second one; the steps of the first."""

    def played(watched: WatchedEnv, number: int) -> list[TracedStep]:
        # Generators of the process begin differently in each run, so that an environment that uses them is found.
        random.seed(1000 + number)
        np.random.seed(1000 + number)
        return trace(watched, plan)

    watched = watched_for("determinism")
    first = played(watched, 0)
    watched.close()
    watched = watched_for("determinism")
    different = report_difference(
        findings, first, played(watched, 1), "two environments with the same seed and actions differ",
        "Draw from `self.np_random` only, which `super().reset(seed=seed)` seeds, and not from random, np.random or "
        "the clock",
    )  # fmt: skip
    if not different:
        watched.episode = -1
        report_difference(
            findings, first, played(watched, 2),
            "reset(seed=…) of an environment that was used before gives another episode",
            "Let reset() restore everything: also counters, caches, and what an episode has changed",
        )  # fmt: skip
    watched.close()
    return first


def descriptors() -> dict[str, str]:
    """Open descriptors of this process, and where they lead."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the listing's own descriptor
    return found


def check_resources(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Open and close the environment several times, and count descriptors and threads."""

    def cycle() -> None:
        watched = watched_for("resources")
        watched.reset(seed=plan.seed)
        actions = actions_of(watched.env, plan.seed)
        for _ in range(3):
            _, _, terminated, truncated, _ = watched.step(next(actions))
            if any(ended(each) if isinstance(each, Mapping) else np.any(each) for each in (terminated, truncated)):
                break
        watched.close()

    watched = watched_for("resources")
    _grows(watched.reset, SEVERAL_RESETS, "reset()", "Close in reset() what the last episode has opened", findings)
    watched.close()
    _grows(cycle, CYCLES, "opening and closing the environment", "Close them in close()", findings)


def _grows(act: Callable[[], Any], times: int, name: str, advice: str, findings: FindingList) -> None:
    """Report descriptors or threads of which each repetition after the first one leaves more."""
    open_before: list[dict[str, str]] = []
    threads: list[list[str]] = []
    for _ in range(times):
        act()
        gc.collect()
        open_before.append(descriptors())
        threads.append([thread.name for thread in threading.enumerate()])
    for kind, counts in (("descriptors", open_before), ("threads", threads)):
        sizes = [len(each) for each in counts]
        if all(later > earlier for earlier, later in pairwise(sizes)):
            more = sizes[-1] - sizes[0]
            if kind == "descriptors":
                new = sorted({open_before[-1][number] for number in open_before[-1].keys() - open_before[0].keys()})
            else:
                new = sorted(set(threads[-1]) - set(threads[0]))
            findings.add(
                "resources", f"{name}, {times} times", f"{more} more {kind} are open: {', '.join(new[:4])}", advice,
                kind=kind,
            )  # fmt: skip
