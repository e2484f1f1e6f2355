"""Checks of a vector environment: shapes, autoreset, last observations, seeds of its parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from rlmesh.envs.checks.calls import WatchedEnv
from rlmesh.envs.checks.episodes import AliasGuard, CheckPlan, SpaceGuard, Watched, actions_of
from rlmesh.envs.checks.findings import CheckStopped, FindingList
from rlmesh.envs.checks.values import digest, first_difference, short, violations

__all__ = ["check_last_observations", "check_vector_episodes"]


def check_vector_episodes(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Step all sub-environments with random actions and look at every value."""
    watched = watched_for("episodes")
    spaces, aliases = SpaceGuard(watched), AliasGuard(watched)
    mode = autoreset_mode(watched)
    observation, info = watched.reset(seed=plan.seed)
    _check_seeds(watched, observation, plan)
    observation, info = watched.reset(seed=plan.seed)
    actions, ended = actions_of(watched.env, plan.seed), None
    for _ in range(plan.steps):
        for check, place, what in violations(spaces.first["observation_space"], observation, "observation"):
            findings.add(
                check, f"{watched.where}, {place}", what, "Make observations fit observation_space",
                kind=place.partition("[")[0] + what[:12],
            )  # fmt: skip
        aliases.look()
        spaces.look()
        aliases.keep(observation, info)
        observation, rewards, terminated, truncated, info = _stepped(watched, next(actions), ended, mode)
        _check_columns(watched, rewards, terminated, truncated)
        ended = np.asarray(terminated) | np.asarray(truncated)
    watched.close()


def autoreset_mode(watched: WatchedEnv) -> AutoresetMode:
    """The declared autoreset mode; a missing one is reported, and stops the check."""
    try:
        if not isinstance(getattr(watched.env, "single_observation_space", None), Space):
            raise LookupError("single_observation_space")
        return AutoresetMode(watched.env.metadata["autoreset_mode"])
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        watched.findings.add(
            "interface", "the vector environment", f"it has no right {short(error)}",
            "Set metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode, so that callers know what follows the "
            "end of an episode, and single_observation_space", kind="mode",
        )  # fmt: skip
        raise CheckStopped from error


def _stepped(watched: WatchedEnv, actions: Any, ended: Any, mode: AutoresetMode) -> Any:
    """The next step; without autoreset, the parts that have ended are reset before."""
    if mode is AutoresetMode.DISABLED and ended is not None and ended.any():
        watched.reset(options={"reset_mask": ended})
    return watched.step(actions)


def _check_columns(watched: WatchedEnv, rewards: Any, terminated: Any, truncated: Any) -> None:
    count = watched.env.num_envs
    for name, column, kinds in (
        ("rewards", rewards, "iuf"), ("terminations", terminated, "b"), ("truncations", truncated, "b"),
    ):  # fmt: skip
        check = "reward" if name == "rewards" else "interface"
        array = column if isinstance(column, np.ndarray) else None
        if array is None or array.shape != (count,) or array.dtype.kind not in kinds:
            form = "numbers" if kinds == "iuf" else "booleans"
            watched.findings.add(
                check, watched.where, f"{name} are {short(column)}, not an array of {count} {form}",
                f"Return a NumPy array [num_envs] of {form}", kind=name,
            )  # fmt: skip
            raise CheckStopped
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            watched.findings.add(
                check, watched.where, f"{name} are not finite: {short(array)}", "Return finite rewards", kind=name
            )


def parts_of(batched: Any, count: int) -> list[Any]:
    """The value of each sub-environment in batched arrays, dicts or tuples of arrays."""
    if isinstance(batched, dict):
        below = {key: parts_of(value, count) for key, value in batched.items()}
        return [{key: values[number] for key, values in below.items()} for number in range(count)]
    if isinstance(batched, tuple) and not (len(batched) == count and not isinstance(batched[0], np.ndarray)):
        rows = [parts_of(value, count) for value in batched]
        return [tuple(row[number] for row in rows) for number in range(count)]
    return [batched[number] for number in range(count)]


def _check_seeds(watched: WatchedEnv, observation: Any, plan: CheckPlan) -> None:
    """Report sub-environments that all start equally, although the seed decides how they start."""
    count = watched.env.num_envs
    if count < 2:
        return
    first = [digest(part) for part in parts_of(copy.deepcopy(observation), count)]
    other = watched.reset(seed=plan.seed + 10_000)[0]
    if len(set(first)) == 1 and digest(parts_of(other, count)[0]) != first[0]:
        watched.findings.add(
            "seeding", watched.where, f"all {count} sub-environments start with the same observation",
            "Seed sub-environment i with seed + i where reset() gets one number", kind="equal",
        )  # fmt: skip


def check_last_observations(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Look at what a vector environment returns when an episode ends, by its autoreset mode."""
    watched = watched_for("last observations")
    mode = autoreset_mode(watched)
    if mode is AutoresetMode.SAME_STEP:
        _check_same_step(watched, plan, findings)
    elif mode is AutoresetMode.NEXT_STEP:
        _check_next_step(watched, watched_for, plan, findings)
    watched.close()


def _ends(watched: WatchedEnv, plan: CheckPlan, actions: Iterator[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Observation, flags and info of the steps in which an episode ends."""
    watched.reset(seed=plan.seed)
    for _ in range(plan.episode_steps):
        observation, _, terminated, truncated, info = watched.step(next(actions))
        ended = np.asarray(terminated) | np.asarray(truncated)
        if ended.any():
            yield observation, ended, info


def _check_same_step(watched: WatchedEnv, plan: CheckPlan, findings: FindingList) -> None:
    advice = (
        "In the mode SAME_STEP, info['final_obs'][i] is the last observation of the episode that ends in "
        "sub-environment i: the value of a truncated episode is estimated from it"
    )
    seen = 0
    for observation, ended, info in _ends(watched, plan, actions_of(watched.env, plan.seed)):
        starts = parts_of(observation, watched.env.num_envs)
        final = info.get("final_obs")
        for part in np.flatnonzero(ended):
            where = f"{watched.where}, sub-environment {part}"
            if final is None:
                findings.add("final-observation", where, "info has no 'final_obs'", advice, kind="missing")
                return
            last = parts_of(final, watched.env.num_envs)[part]
            if last is None:
                findings.add("final-observation", where, "its 'final_obs' is None", advice, kind="missing")
                return
            for _, place, what in violations(watched.env.single_observation_space, last, "final_obs"):
                findings.add("final-observation", f"{where}, {place}", what, advice, kind="space")
            if first_difference(last, starts[part], "") is None:
                findings.add(
                    "final-observation", where, "its 'final_obs' is the first observation of the next episode", advice,
                    kind="start",
                )  # fmt: skip
                return
            seen += 1
        if seen >= 3 * watched.env.num_envs:
            return


def _check_next_step(watched: WatchedEnv, watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Find environments that declare NEXT_STEP and have already reset: the following step is then a real one."""
    advice = (
        "In the mode NEXT_STEP, the step in which an episode ends returns its last observation, and the following step "
        "ignores its action and returns the first observation of the next episode, with reward 0 and no end; declare "
        "SAME_STEP if the environment resets at once"
    )
    actions = actions_of(watched.env, plan.seed)
    played: list[Any] = []

    def noted() -> Iterator[Any]:
        for action in actions:
            played.append(action)
            yield action

    ended = next((ended for _, ended, _ in _ends(watched, plan, noted())), None)
    if ended is None:
        return
    part = int(np.flatnonzero(ended)[0])
    observation, rewards, terminated, truncated, _ = watched.step(next(actions))
    where = f"{watched.where}, sub-environment {part}"
    if rewards[part] != 0 or terminated[part] or truncated[part]:
        findings.add(
            "final-observation", where,
            f"the step after the end of an episode gives reward {short(rewards[part])}: the last observation is lost",
            advice, kind="stepped",
        )  # fmt: skip
        return
    observation = copy.deepcopy(parts_of(observation, watched.env.num_envs)[part])
    other = watched_for("last observations")
    other.reset(seed=plan.seed)
    for action in played:
        other.step(action)
    for _ in range(8):
        action = next(actions)
        if first_difference(action, played[-1], "") is not None:
            break
    again = parts_of(other.step(action)[0], watched.env.num_envs)[part]
    other.close()
    if first_difference(observation, again, "") is not None:
        findings.add(
            "final-observation", where,
            "the observation after the end of an episode depends on the action, so it is not the first one of the next "
            "episode", advice, kind="stepped",
        )  # fmt: skip
