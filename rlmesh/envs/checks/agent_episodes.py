"""Checks of an environment of several agents: its dicts, values, aliases, spaces, and how each agent's part ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from gymnasium import Space

from rlmesh.envs.checks.calls import WatchedEnv
from rlmesh.envs.checks.episodes import (
    AliasGuard,
    CheckPlan,
    Watched,
    actions_of,
    check_action,
    check_flags,
    check_observation,
    check_reward,
    watch_inner_levels,
)
from rlmesh.envs.checks.findings import CheckStopped, FindingList
from rlmesh.envs.checks.values import ended, short
from rlmesh.envs.multi_agent.environment import ALL

__all__ = ["check_agent_episodes"]

KINDS = ("observation_space", "action_space")


class AgentSpaces:
    """The spaces of each agent, as they were when it was seen first."""

    def __init__(self, watched: WatchedEnv) -> None:
        self._watched = watched
        self.first: dict[tuple[str, Any], Any] = {}

    def observation_space(self, agent: Any) -> Any:
        """The observation space of an agent; reports spaces that are missing or have changed.

        Raises:
            CheckStopped: an agent has no space.
        """
        for kind in KINDS:
            now = self._now(kind, agent)
            if (kind, agent) not in self.first:
                self.first[kind, agent] = copy.deepcopy(now)
            elif now != self.first[kind, agent]:
                self._watched.findings.add(
                    "changed-space", self._watched.where,
                    f"{kind} of agent {agent!r} was {short(self.first[kind, agent])} and is now {short(now)}",
                    "Keep spaces as they are after __init__: modules are built for them. Pad observations, or mask "
                    "actions, where their number varies", kind=kind,
                )  # fmt: skip
        return self.first[KINDS[0], agent]

    def _now(self, kind: str, agent: Any) -> Any:
        try:
            space = getattr(self._watched.env.env, f"get_{kind}")(agent)
        except Exception as error:  # the environment's own code
            space = f"{type(error).__name__}: {error}"
        if not isinstance(space, Space):
            self._watched.findings.add(
                "interface", f"{kind} of agent {agent!r}", f"it is {short(space)}, not a space of Gymnasium",
                f"Set {kind}s (by agent) or {kind}; environments of PettingZoo have a method {kind}(agent)", kind=kind,
            )  # fmt: skip
            raise CheckStopped
        return space


class AgentParts:
    """The parts of the agents in an episode: who has acted, and who is done."""

    def __init__(self, watched: WatchedEnv) -> None:
        self._watched = watched
        self._done: set[Any] = set()
        self._acted: set[Any] = set()

    def take(self, actions: Mapping[Any, Any], results: tuple[Any, ...]) -> None:
        """Report agents that come back after their end, and truncated ones without their last observation."""
        observations, rewards, terminateds, truncateds, _ = results
        self._acted |= actions.keys()
        for agent in sorted(self._done, key=repr):
            if agent in observations or rewards.get(agent):
                what = "an observation" if agent in observations else f"the reward {short(rewards[agent])}"
                self._watched.findings.add(
                    "after-the-end", self._watched.where,
                    f"agent {agent!r} was done in an earlier step, and has {what} again",
                    "Leave an agent out of all dicts once it is terminated or truncated; an agent that joins later in "
                    "the episode needs another name", kind="agent",
                )  # fmt: skip
        over, cut = ended(terminateds), ended(truncateds)
        for agent in sorted(self._acted - self._done, key=repr):
            terminated, truncated = bool(terminateds.get(agent)), bool(truncateds.get(agent))
            if not (terminated or truncated):
                terminated, truncated = over, cut
            if truncated and not terminated and agent not in observations:
                self._watched.findings.add(
                    "final-observation", self._watched.where,
                    f"agent {agent!r} was truncated without an observation of it",
                    "Return its last observation: the value after its last step is estimated from it", kind="agent",
                )  # fmt: skip
        flagged = {*terminateds, *truncateds} - {ALL}
        self._done |= {agent for agent in flagged if terminateds.get(agent) or truncateds.get(agent)}


def check_agent_episodes(watched_for: Watched, plan: CheckPlan, findings: FindingList) -> None:
    """Play episodes with random actions and look at every value of every agent."""
    watched = watched_for("episodes")
    spaces, aliases = AgentSpaces(watched), AliasGuard(watched)
    watch_inner_levels(watched, findings)
    actions = actions_of(watched.env, plan.seed)
    parts, over = AgentParts(watched), True
    for number in range(plan.steps):
        if over:
            observations, infos = watched.reset(**({"seed": plan.seed} if number == 0 else {}))
            parts, over = AgentParts(watched), False
            if not observations:
                findings.add(
                    "interface", watched.where, "reset() returned no observation, so that no agent can act",
                    "Return the observations of the agents that act first", kind="nobody",
                )  # fmt: skip
                raise CheckStopped
        else:
            given = next(actions)
            before = copy.deepcopy(given)
            results = watched.step(given)
            check_action(before, given, watched.where, findings)
            observations, rewards, terminateds, truncateds, infos = results
            for agent, reward in rewards.items():
                check_reward(reward, f"{watched.where}, agent {agent!r}", findings)
            for agent in {**terminateds, **truncateds}:
                flags = terminateds.get(agent, False), truncateds.get(agent, False)
                check_flags(*flags, f"{watched.where}, {agent!r}", findings)
            parts.take(before, results)
            over = ended(terminateds) or ended(truncateds)
        for agent, observation in observations.items():
            space, name = spaces.observation_space(agent), f"observation[{agent!r}]"
            check_observation(space, observation, watched.where, findings, name=name)
        aliases.look()
        aliases.keep(observations, infos)
    watched.close()
