"""Checks of a single environment: its interface, values, aliases, ends and start states."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from rlmesh.envs.checks.agents import AgentsAsOne
from rlmesh.envs.checks.calls import WatchedEnv
from rlmesh.envs.checks.findings import CheckStopped, FindingList
from rlmesh.envs.checks.levels import watch_levels
from rlmesh.envs.checks.values import Kept, ended, first_difference, is_number, short, violations

__all__ = ["CheckPlan", "SpaceGuard", "actions_of", "check_end", "check_episodes"]

KEPT = 32
"""Number of returned values that are kept, to find out whether they change."""


@dataclass(frozen=True)
class CheckPlan:
    """The extent of the checks.

    Attributes:
        seed: seed of the first reset, and of the actions.
        steps: steps of each check, over all episodes.
        episode_steps: an episode that has not ended after so many steps is left.
    """

    seed: int = 0
    steps: int = 300
    episode_steps: int = 2000


Watched = Callable[[str], WatchedEnv]
"""Makes a new environment for the check of this name."""


def actions_of(env: Any, seed: int) -> Iterator[Any]:
    """Random actions of the environment's action space, the same ones for the same seed."""
    if isinstance(env, AgentsAsOne):
        yield from env.random_actions(seed)
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    while True:
        yield space.sample()


class SpaceGuard:
    """Compares an environment's spaces with what they were at first."""

    NAMES = ("observation_space", "action_space")

    def __init__(self, watched: WatchedEnv) -> None:
        self._watched = watched
        for name in self.NAMES:
            space = getattr(watched.env, name, None)
            if not isinstance(space, Space):
                watched.findings.add(
                    "interface", name, f"it is {short(space)}, not a space of Gymnasium",
                    f"Set `self.{name}` to a gymnasium.spaces.Space in __init__", kind=name,
                )  # fmt: skip
                raise CheckStopped
        self.first = {name: copy.deepcopy(getattr(watched.env, name)) for name in self.NAMES}

    def look(self) -> None:
        """Report spaces that differ from the first ones."""
        for name, first in self.first.items():
            now = getattr(self._watched.env, name)
            if now is not first and now != first:
                self._watched.findings.add(
                    "changed-space", self._watched.where, f"{name} was {short(first)} and is now {short(now)}",
                    "Keep spaces as they are after __init__: modules are built for them. Pad observations, or mask "
                    "actions, where their number varies", kind=name,
                )  # fmt: skip


class AliasGuard:
    """Keeps the last observations and infos that were returned, and reports those that change."""

    def __init__(self, watched: WatchedEnv) -> None:
        self._watched = watched
        self._kept: deque[Kept] = deque(maxlen=KEPT)

    def look(self) -> None:
        """Report kept values that have changed since."""
        for kept in list(self._kept):
            place = kept.changed()
            if place is not None:
                self._kept.remove(kept)
                self._watched.findings.add(
                    "aliasing", self._watched.where, f"this call changed the {place} that was returned in {kept.when}",
                    "Return a new array each time, for example `self._obs.copy()`, or a new dict: a caller that keeps "
                    "what it got would see later values", kind=place,
                )  # fmt: skip

    def keep(self, observation: Any, info: Any) -> None:
        """Keep the values that the last call returned."""
        self._kept.append(Kept(observation, "observation", self._watched.where))
        self._kept.append(Kept(info, "info", self._watched.where))


def check_episodes(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Play episodes with random actions and look at every value."""
    watched = watched_for("episodes")
    spaces, aliases = SpaceGuard(watched), AliasGuard(watched)
    watch_inner_levels(watched, findings)
    actions = actions_of(watched.env, plan.seed)
    over = True
    for number in range(plan.steps):
        terminated = truncated = False
        if over:
            observation, info = watched.reset(**({"seed": plan.seed} if number == 0 else {}))
        else:
            action = next(actions)
            before = copy.deepcopy(action)
            observation, reward, terminated, truncated, info = watched.step(action)
            check_action(before, action, watched.where, findings)
            check_reward(reward, watched.where, findings)
            check_flags(terminated, truncated, watched.where, findings)
        check_observation(spaces.first["observation_space"], observation, watched.where, findings)
        aliases.look()
        spaces.look()
        aliases.keep(observation, info)
        over = bool(terminated or truncated)
    watched.close()


def watch_inner_levels(watched: WatchedEnv, findings: FindingList) -> None:
    """Report resets within a step, and steps of an inner level after its end."""

    def found(check: str, level: str) -> None:
        if check == "double-reset":
            findings.add(
                check, watched.where, f"the step calls reset() of {level}",
                "Leave resets to the caller, which resets after terminated or truncated: with both, every other start "
                "state is skipped, and the last observation is lost", kind="reset",
            )  # fmt: skip
        else:
            findings.add(
                check, watched.where, f"{level}.step() is called again after it has returned terminated or truncated",
                "A wrapper that repeats steps must stop at the end of the episode", kind="inner",
            )  # fmt: skip

    watch_levels(watched.env, found)


def check_action(before: Any, action: Any, where: str, findings: FindingList) -> None:
    """Report a step that has changed its argument."""
    if (difference := first_difference(before, action, "action")) is not None:
        findings.add(
            "aliasing", where, f"the step changes its argument: {difference}", "Copy the action before changing it",
            kind="action",
        )  # fmt: skip


def check_observation(
    space: Any, observation: Any, where: str, findings: FindingList, *, name: str = "observation"
) -> None:
    """Report what speaks against an observation being in its space."""
    for check, place, what in violations(space, observation, name):
        advice = (
            "Convert observations, for example `obs.astype(space.dtype)`, or change the space's dtype"
            if check == "dtype"
            else "Clip or repair the observation, or widen observation_space"
        )
        findings.add(check, f"{where}, {place}", what, advice, kind=place.partition("[")[0] + what[:12])


def check_reward(reward: Any, where: str, findings: FindingList) -> None:
    """Report a reward that is no finite number."""
    if not is_number(reward):
        findings.add(
            "reward", where, f"the reward is {short(reward)} ({type(reward).__name__}), not a finite number",
            "Return a float", kind=type(reward).__name__,
        )  # fmt: skip


def check_flags(terminated: Any, truncated: Any, where: str, findings: FindingList) -> None:
    """Report flags that are no booleans."""
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            findings.add(
                "interface", where, f"{name} is {short(flag)} ({type(flag).__name__}), not a bool",
                f"Return `bool({name})`", kind=name,
            )  # fmt: skip
            if not isinstance(flag, int | float | np.number):
                raise CheckStopped


def check_end(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Look at what follows the end of an episode: another step, and the next start state."""
    watched = watched_for("end of an episode")
    starts = [watched.reset(seed=plan.seed)[0], watched.reset()[0], watched.reset()[0]]
    starts = copy.deepcopy(starts)
    actions = actions_of(watched.env, plan.seed)
    watched.reset(seed=plan.seed)
    last = _play(watched, actions, plan)
    if last is None:
        watched.close()
        return  # An episode without an end in sight has nothing to look at.
    following = copy.deepcopy(watched.reset()[0])
    if first_difference(following, starts[1], "") is not None and first_difference(following, starts[2], "") is None:
        early = first_difference(last, starts[1], "") is None
        findings.add(
            "double-reset", watched.where,
            f"the second start state of seed {plan.seed} was skipped: the environment resets itself at an episode's end"
            + "; the first observation of the next episode took the place of the last one" * early,
            "Leave resets to the caller, which resets after terminated or truncated", kind="reset",
        )  # fmt: skip
    else:
        _step_after_the_end(watched, actions, plan, findings)
    watched.close()


def _play(watched: WatchedEnv, actions: Iterator[Any], plan: CheckPlan) -> Any:
    """Play to the end of the episode; its last observation, or None if it does not end in time."""
    for _ in range(plan.episode_steps):
        observation, _, terminated, truncated, _ = watched.step(next(actions))
        if ended(terminated) or ended(truncated):
            return copy.deepcopy(observation)
    return None


def _step_after_the_end(watched: WatchedEnv, actions: Iterator[Any], plan: CheckPlan, findings: FindingList) -> None:
    if _play(watched, actions, plan) is None:
        return
    outer, watched.findings = watched.findings, FindingList(lambda finding: None)
    try:
        _, reward, terminated, truncated, _ = watched.step(next(actions))
    except CheckStopped:
        return  # Refusing the step is right.
    finally:
        watched.findings = outer
    if not ended(terminated) and not ended(truncated):
        findings.add(
            "after-the-end", watched.where,
            f"a step after the end of the episode is accepted: terminated and truncated are False again, the reward is "
            f"{short(reward)}",
            "Raise an error, or keep returning the flag, until reset() is called: a caller that misses the end gets "
            "steps that belong to no episode", kind="revived",
        )  # fmt: skip
