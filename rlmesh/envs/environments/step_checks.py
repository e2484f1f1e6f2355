"""Checks of what an environment's ``step`` returns: wrong kinds of values would become wrong numbers without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh.errors import UsageError

__all__ = ["check_agents_step", "check_reset", "check_step", "reward_of"]

FIVE = ("observation", "reward", "terminated", "truncated", "info")
FIVE_OF_AGENTS = ("observations", "rewards", "terminateds", "truncateds", "infos")
NUMBERS = (float, int, np.number, np.bool_)


def reward_of(given: Any, place: str) -> float:
    """A reward as a float.

    Raises:
        UsageError: it is no number; an array without dimensions counts as one.
    """
    if isinstance(given, NUMBERS) or (
        isinstance(given, np.ndarray) and given.shape == () and given.dtype.kind in "biuf"
    ):
        return float(given)
    raise UsageError(f"{place} returned the reward {given!r:.80} ({type(given).__name__}): a reward is a number")


def check_reset(results: Any, env: Any) -> None:
    """Check that an environment's ``reset`` returned an observation and an info.

    Raises:
        UsageError: they are not two, or the info is no dict.
    """
    place = f"reset() of {_name_of(env)}"
    if not isinstance(results, tuple | list) or len(results) != 2:
        found = f"{len(results)} values" if isinstance(results, tuple | list) else f"{results!r:.80}"
        raise UsageError(f"{place} returned {found}; the two of Gymnasium are observation, info")
    if not isinstance(info := results[1], Mapping | None):
        raise UsageError(f"{place} returned the info {info!r:.80} ({type(info).__name__}): it is a dict")


def check_step(results: Any, env: Any) -> None:
    """Check the kinds of values of one step of an environment of one agent.

    Raises:
        UsageError: they are not five, the reward is no number, a flag is no bool, or the info is no dict.
    """
    place = f"step() of {_name_of(env)}"
    _, reward, terminated, truncated, info = _five(results, FIVE, place)
    reward_of(reward, place)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        _check_flag(flag, f"{place} returned {name} =")
    if not isinstance(info, Mapping):
        raise UsageError(f"{place} returned the info {info!r:.80} ({type(info).__name__}): it is a dict")


def check_agents_step(results: Any, env: Any) -> None:
    """Check the kinds of values of one step of a `MultiAgentEnv`; rewards are checked where they are added.

    Raises:
        UsageError: they are not five dicts, or a flag is no bool.
    """
    place = f"step() of {_name_of(env)}"
    given = _five(results, FIVE_OF_AGENTS, place)
    for name, each in zip(FIVE_OF_AGENTS, given, strict=True):
        if not isinstance(each, Mapping):
            raise UsageError(
                f"{place} returned {name} = {each!r:.80} ({type(each).__name__}): they are a dict by agent"
            )
    for name, flags in (("terminateds", given[2]), ("truncateds", given[3])):
        for agent_id, flag in flags.items():
            _check_flag(flag, f"{place} returned {name}[{agent_id!r}] =")


def _five(results: Any, names: tuple[str, ...], place: str) -> tuple[Any, ...]:
    if not isinstance(results, tuple | list) or len(results) != 5:
        found = f"{len(results)} values" if isinstance(results, tuple | list) else f"{results!r:.80}"
        raise UsageError(f"{place} returned {found}; the five of Gymnasium are {', '.join(names)}")
    return tuple(results)


def _check_flag(flag: Any, what: str) -> None:
    if not isinstance(flag, bool | np.bool_) and not (isinstance(flag, int | np.integer) and flag in (0, 1)):
        raise UsageError(f"{what} {flag!r:.80} ({type(flag).__name__}): it is True or False")


def _name_of(env: Any) -> str:
    return type(getattr(env, "unwrapped", env)).__name__
