"""An environment whose wrappers are watched: resets within a step, and steps of an inner level after its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from rlmesh.envs.checks.agents import AgentsAsOne
from rlmesh.envs.checks.values import ended

__all__ = ["watch_levels"]


class WatchedLevel:
    """One level of an environment, from the outermost wrapper to the environment itself."""

    def __init__(self, env: Any, outermost: WatchedLevel | None, found: Callable[[str, str], None]) -> None:
        self.name = type(env).__name__
        self.outermost = outermost or self
        self.is_outermost = outermost is None
        self.stepping = self.ended = False
        self._found = found
        self._step, self._reset = env.step, env.reset
        env.step, env.reset = self.step, self.reset

    def step(self, *args: Any, **options: Any) -> Any:
        if self.ended and not self.is_outermost:
            self._found("after-the-end", self.name)
        outer, self.stepping = self.stepping, True
        try:
            result = self._step(*args, **options)
        finally:
            self.stepping = outer
        if isinstance(result, tuple) and len(result) == 5:
            self.ended = _true(result[2]) or _true(result[3])  # inner levels of PettingZoo have no flag for all agents
        return result

    def reset(self, *args: Any, **options: Any) -> Any:
        if self.outermost.stepping:
            self._found("double-reset", self.name)
        result = self._reset(*args, **options)
        self.ended = False
        return result


def _true(flag: Any) -> bool:
    try:
        return ended(flag)
    except (TypeError, ValueError):
        return False


def watch_levels(env: Any, found: Callable[[str, str], None]) -> None:
    """Replace ``step`` and ``reset`` of each level; ``found`` gets the name of a check and that of the level's class.

    An environment that calls ``self.reset()`` in its step is found, and a wrapper that repeats actions without looking
    whether the episode has ended.
    """
    outermost: WatchedLevel | None = None
    agents = isinstance(env, AgentsAsOne)
    while True:
        try:
            level = WatchedLevel(env, outermost, found)
        except AttributeError:
            return  # An object that takes no attributes cannot be watched.
        outermost = outermost or level
        inner = env.env if isinstance(env, gymnasium.Wrapper) else getattr(env, "env", None) if agents else None
        if inner is None:
            return
        env = inner
