"""`MultiAgentEnv`: an environment of several agents, with dicts by agent in place of single values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlmesh.envs.environments.registry import EnvContext, env_creator_of
from rlmesh.errors import UsageError

__all__ = ["ALL", "AgentID", "MultiAgentEnv", "make_multi_agent"]

AgentID = Hashable
ALL = "__all__"
"""Key of ``terminateds`` and ``truncateds`` for the episode as a whole."""


class MultiAgentEnv(gymnasium.Env[Any, Any]):
    """Base of environments of several agents, in the form of RLlib's class of this name.

    ``reset(seed=…, options=…)`` returns ``(observations, infos)``, and ``step(actions)`` returns ``(observations,
    rewards, terminateds, truncateds, infos)``: dicts by agent.

    An agent acts next exactly if it is in the returned ``observations``; ``actions`` has these agents, and no others.
    So agents may act together, in turns, or in any other order. Rewards of an agent between two of its observations are
    added up, and belong to the action before them. An agent that is in ``terminateds`` or ``truncateds`` with a true
    value is done, and does not come back in this episode; others may join at any time. ``terminateds["__all__"]`` is
    required: True ends the episode of all agents. So does ``truncateds["__all__"]``. A truncated agent needs its last
    observation in ``observations``, since the value after its last step is estimated from it.

    Attributes:
        possible_agents: agents that may take part.
        agents: agents of now.
        observation_spaces, action_spaces: spaces by agent. Without them, ``observation_space`` and ``action_space`` are
            those of each agent, or Dict spaces by agent.
    """

    possible_agents: Sequence[Any] = ()
    agents: Sequence[Any] = ()
    observation_spaces: Mapping[Any, Any] | None = None
    action_spaces: Mapping[Any, Any] | None = None
    observation_space: Any = None
    action_space: Any = None

    def get_observation_space(self, agent_id: AgentID) -> Any:
        """The observation space of an agent.

        Raises:
            UsageError: the environment has none for this agent.
        """
        return self._space_of(agent_id, "observation_space")

    def get_action_space(self, agent_id: AgentID) -> Any:
        """The action space of an agent.

        Raises:
            UsageError: the environment has none for this agent.
        """
        return self._space_of(agent_id, "action_space")

    def _space_of(self, agent_id: AgentID, name: str) -> Any:
        by_agent, single = getattr(self, name + "s"), getattr(self, name)
        if by_agent is None and isinstance(single, gymnasium.spaces.Dict) and agent_id in single.spaces:
            by_agent = single.spaces
        if by_agent is not None:
            if agent_id in by_agent:
                return by_agent[agent_id]
            raise UsageError(
                f"{type(self).__name__}.{name}s has no agent {agent_id!r}; it has {', '.join(map(repr, by_agent))}"
            )
        if single is None:
            raise UsageError(
                f"{type(self).__name__} has no {name} for agent {agent_id!r}: set {name}s (by agent) or {name}"
            )
        return single

    def known_agents(self) -> list[Any]:
        """The agents that may take part, as far as the environment names them; it is reset if it names none."""
        for named in (self.possible_agents, self.observation_spaces, self.agents):
            if named:
                return list(named)
        if isinstance(self.observation_space, gymnasium.spaces.Dict) and isinstance(
            self.action_space, gymnasium.spaces.Dict
        ):
            shared = self.observation_space.spaces.keys() & self.action_space.spaces.keys()
            if shared and shared == self.action_space.spaces.keys():
                return list(self.action_space.spaces)
        return list(self.reset()[0])


def make_multi_agent(env: str | type | Callable[[EnvContext], Any]) -> type[Any]:
    """A `MultiAgentEnv` class of independent copies of an environment of one agent, with agents 0, 1, 2, ….

    ``env_config`` has the key ``num_agents`` (by default 1); the rest goes to the environment. A copy whose episode has
    ended takes no further part, and the episode of all ends with that of the last copy.

    Args:
        env: an id of Gymnasium, a registered name, a class, or a creator.
    """
    creator = env_creator_of(env)

    class Copies(MultiAgentEnv):
        env_id = getattr(creator, "env_id", None)

        def __init__(self, config: Mapping[str, Any] | None = None) -> None:
            given = dict(config or {})
            count = given.pop("num_agents", 1)
            if type(count) is not int or count < 1:
                raise UsageError(f"make_multi_agent: env_config num_agents is a whole number above 0, not {count!r}")
            self.envs = [creator(EnvContext(given, vector_index=i)) for i in range(count)]
            self.possible_agents = self.agents = list(range(count))
            self.observation_spaces = {i: each.observation_space for i, each in enumerate(self.envs)}
            self.action_spaces = {i: each.action_space for i, each in enumerate(self.envs)}
            self.metadata = dict(getattr(self.envs[0], "metadata", None) or {})
            self.render_mode = getattr(self.envs[0], "render_mode", None)
            self.done: set[int] = set()

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            self.done.clear()
            each = {
                i: env.reset(seed=None if seed is None else seed + i, options=options)
                for i, env in enumerate(self.envs)
            }
            return {i: observation for i, (observation, _) in each.items()}, {i: info for i, (_, info) in each.items()}

        def step(self, actions: Mapping[int, Any]) -> tuple[Any, Any, Any, Any, Any]:
            each = {i: self.envs[i].step(action) for i, action in actions.items()}
            self.done |= {i for i, result in each.items() if result[2] or result[3]}
            observations, rewards, terminateds, truncateds, infos = (
                {i: result[place] for i, result in each.items()} for place in range(5)
            )
            terminateds[ALL], truncateds[ALL] = len(self.done) == len(self.envs), False  # type: ignore[index]
            return observations, rewards, terminateds, truncateds, infos

        def render(self) -> Any:
            frames = [env.render() for env in self.envs]
            arrays = all(isinstance(frame, np.ndarray) for frame in frames)
            return np.concatenate(frames, 1) if arrays else frames  # side by side

        def close(self) -> None:
            for env in self.envs:
                env.close()

    return Copies
