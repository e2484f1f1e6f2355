"""Calls of an environment: each is announced before it begins, and an exception becomes a finding."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlmesh.envs.checks.agents import AgentsAsOne
from rlmesh.envs.checks.findings import CheckStopped, FindingList
from rlmesh.envs.checks.values import short
from rlmesh.envs.multi_agent.environment import ALL

__all__ = ["WatchedEnv"]

Result = TypeVar("Result")


class WatchedEnv:
    """An environment whose calls are announced, so that another process can see which one does not return.

    Args:
        make: makes the environment.
        purpose: the name of the running check.
        announce: gets a text and ``"reset"`` or ``"step"`` before each call.
        findings: gets exceptions and wrong return values.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        purpose: str,
        announce: Callable[[str, str], object],
        findings: FindingList,
    ) -> None:
        self.findings = findings
        self._announce, self._purpose = announce, purpose
        self.episode, self.t = -1, 0
        self.env = self._called("making the environment", "reset", make)

    @property
    def where(self) -> str:
        """The last call: ``episode 0, step 3``; step 0 is the reset."""
        return f"episode {self.episode}, step {self.t}"

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Observation and info of the environment's reset."""
        self.episode, self.t = self.episode + 1, 0
        result = self._called(f"{self.where} (reset)", "reset", lambda: self.env.reset(**options))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            self._stop(
                f"reset() returned {short(result)}, not a pair of observation and info dict",
                "Return `observation, info`; environments of the old gym are wrapped by shimmy",
            )
        if isinstance(self.env, AgentsAsOne):
            self._require_dicts(observations=result[0])
        return result[0], result[1]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Observation, reward, terminated, truncated and info of the environment's step."""
        self.t += 1
        result = self._called(f"{self.where}, action {short(action)}", "step", lambda: self.env.step(action))
        if not isinstance(result, tuple) or len(result) != 5:
            self._stop(
                f"step() returned {len(result) if isinstance(result, tuple) else short(result)} values, not 5",
                "Return `observation, reward, terminated, truncated, info`; environments of the old gym, which return "
                "`done`, are wrapped by shimmy",
            )
        if not isinstance(result[4], dict):
            self._stop(f"the info of step() is {short(result[4])}", "Return a dict, empty if there is nothing to say")
        if isinstance(self.env, AgentsAsOne):
            self._require_dicts(observations=result[0], rewards=result[1], terminateds=result[2], truncateds=result[3])
            if ALL not in result[2]:
                self._stop(f"terminateds has no key {ALL!r}", "Set it: True ends the episode of all agents")
        return result[0], result[1], result[2], result[3], result[4]

    def _require_dicts(self, **results: Any) -> None:
        """Report results of several agents that are no dicts by agent."""
        for name, each in results.items():
            if not isinstance(each, Mapping):
                self._stop(f"{name} are {short(each)}, not a dict by agent", "Return a dict with a key for each agent")

    def close(self) -> None:
        self._called("close()", "reset", self.env.close)

    def _stop(self, what: str, advice: str) -> None:
        self.findings.add("interface", self.where, what, advice, kind=what[:12])
        raise CheckStopped

    def _called(self, label: str, kind: str, function: Callable[[], Result]) -> Result:
        self._announce(f"{self._purpose}: {label}", kind)
        try:
            return function()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            outside = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
            place = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
            advice = (
                "Where an episode cannot go on, end it with truncated=True instead"
                if self.t
                else "Repair what keeps the environment from being made or reset"
            )
            self.findings.add(
                "exception", label, f"{type(error).__name__}: {short(str(error))}{place}",
                advice, kind=f"{type(error).__name__}{place}",
            )  # fmt: skip
            raise CheckStopped from error
