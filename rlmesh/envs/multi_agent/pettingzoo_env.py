"""Environments of PettingZoo as `MultiAgentEnv`: those in which all agents act at once, and those with turns."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from rlmesh.envs.multi_agent.environment import ALL, MultiAgentEnv
from rlmesh.errors import UsageError

__all__ = ["ParallelPettingZooEnv", "PettingZooEnv", "multi_agent_env_of"]


def multi_agent_env_of(env: Any) -> MultiAgentEnv | None:
    """The environment as a `MultiAgentEnv`, if it is one or one of PettingZoo; None for environments of one agent."""
    if isinstance(env, MultiAgentEnv):
        return env
    pettingzoo = sys.modules.get("pettingzoo")  # imported already, if the environment is one of PettingZoo
    if pettingzoo is not None and isinstance(env, pettingzoo.ParallelEnv):
        return ParallelPettingZooEnv(env)
    if pettingzoo is not None and isinstance(env, pettingzoo.AECEnv):
        return PettingZooEnv(env)
    return None


def several_agents_env(env: Any) -> MultiAgentEnv:
    """The environment as a `MultiAgentEnv`.

    Raises:
        UsageError: it has one agent.
    """
    found = multi_agent_env_of(env)
    if found is None:
        raise UsageError(
            f"multi_agent(…): the environment {env} has one agent; several agents act in a "
            "MultiAgentEnv or an environment of PettingZoo (make_multi_agent gives several agents copies of it)"
        )
    return found


class _OfPettingZoo(MultiAgentEnv):
    """The common part of PettingZoo's parallel and AEC environments."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = list(getattr(env, "possible_agents", ()))
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)

    @property
    def agents(self) -> Sequence[Any]:
        """Agents that take part now."""
        return list(getattr(self.env, "agents", ()))

    @agents.setter
    def agents(self, value: Any) -> None:
        raise AttributeError("the environment of PettingZoo has its agents")

    def get_observation_space(self, agent_id: Any) -> Any:
        return self.env.observation_space(agent_id)

    def get_action_space(self, agent_id: Any) -> Any:
        return self.env.action_space(agent_id)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class ParallelPettingZooEnv(_OfPettingZoo):
    """An environment of PettingZoo's parallel interface, in which all live agents act at once.

    Args:
        env: a ``pettingzoo.ParallelEnv``.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observations, infos = self.env.reset(seed=seed, options=options)
        return {agent: observations[agent] for agent in self.env.agents}, infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        results = self.env.step(dict(actions))
        live = set(self.env.agents)
        named = live.union(actions)  # some environments go on to name agents that are long done
        observations, rewards, terminateds, truncateds, infos = (
            {agent: value for agent, value in each.items() if agent in named} for each in results
        )
        for agent in actions:
            if agent not in live and not (terminateds.get(agent) or truncateds.get(agent)):
                raise UsageError(
                    f"{self.env}: agent {agent!r} left env.agents, but is neither terminated nor truncated"
                )
        return observations, rewards, {**terminateds, ALL: not live}, {**truncateds, ALL: False}, infos


class PettingZooEnv(_OfPettingZoo):
    """An environment of PettingZoo's AEC interface, in which agents act in turns.

    Each step takes the action of the agent whose turn it is, and returns the observation of the next one. Its reward is
    the sum since its own last turn, as ``env.last()`` gives it. An agent that is done is taken out by the step with the
    action None that the interface asks for; its last observation and reward are returned by the same step.

    Args:
        env: a ``pettingzoo.AECEnv``.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.env.reset(seed=seed, options=options)
        observations, _, _, _, infos = self._next_turn()
        if not self.env.agents:
            raise UsageError(f"{self.env}: no agent is left after the reset")
        agent = self.env.agent_selection
        return {agent: observations[agent]}, {agent: infos[agent]}

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        self.env.step(actions[self.env.agent_selection])
        return self._next_turn()

    def _next_turn(self) -> tuple[Any, Any, Any, Any, Any]:
        """Take out agents that are done, up to the next agent that acts."""
        observations: dict[Any, Any] = {}
        rewards: dict[Any, float] = {}
        terminateds: dict[Any, bool] = {}
        truncateds: dict[Any, bool] = {}
        infos: dict[Any, Any] = {}
        while self.env.agents:
            agent = self.env.agent_selection
            if agent in observations:
                raise UsageError(
                    f"{self.env}: agent {agent!r} is done, and its turn comes again after a step with None"
                )
            observation, reward, terminated, truncated, info = self.env.last()
            observations[agent], rewards[agent], infos[agent] = observation, reward, info
            terminateds[agent], truncateds[agent] = bool(terminated), bool(truncated)
            if not (terminated or truncated):
                break
            observations[agent] = deepcopy(observation)  # the next step may write into the same array
            self.env.step(None)
        return observations, rewards, {**terminateds, ALL: not self.env.agents}, {**truncateds, ALL: False}, infos
