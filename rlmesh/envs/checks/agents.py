"""`AgentsAsOne`: an environment of several agents in the form that the checks and recordings play."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from rlmesh.envs.checks.findings import CheckStopped
from rlmesh.envs.checks.values import ended
from rlmesh.envs.multi_agent.environment import MultiAgentEnv
from rlmesh.envs.multi_agent.pettingzoo_env import multi_agent_env_of
from rlmesh.errors import UsageError

__all__ = ["AgentsAsOne", "playable"]

MASK = "action_mask"
"""Key of the observations or infos of some games: which actions are legal."""


class AgentsAsOne:
    """Several agents, whose observations, rewards, flags and actions are dicts by agent.

    Attributes:
        env: the environment, a `MultiAgentEnv`.
        acting: agents that act next; after the end of an episode, those that acted last.
        action_space: writes lists of actions as JSON, and reads them.
    """

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env, self.acting = env, list[Any]()
        self.action_space = AgentActions(env)
        self._masks: dict[Any, Any] = {}

    def reset(self, **options: Any) -> Any:
        """The environment's ``reset``."""
        result: Any = self.env.reset(**options)
        if isinstance(result, tuple) and len(result) == 2:
            self._note(result[0], {}, {}, result[1])
        return result

    def step(self, actions: Mapping[Any, Any]) -> Any:
        """The environment's ``step``."""
        result: Any = self.env.step(actions)
        if isinstance(result, tuple) and len(result) == 5:
            observations, _, terminateds, truncateds, infos = result
            self._note(observations, terminateds, truncateds, infos)
        return result

    def _note(self, observations: Any, terminateds: Any, truncateds: Any, infos: Any) -> None:
        """Keep who acts next; results of another form are left to the checks."""
        if not all(isinstance(each, Mapping) for each in (observations, terminateds, truncateds)):
            return
        if not (ended(terminateds) or ended(truncateds)):
            self.acting = [agent for agent in observations if not (terminateds.get(agent) or truncateds.get(agent))]
            self._masks = {agent: mask_of(observations[agent], infos, agent) for agent in self.acting}

    def random_actions(self, seed: int) -> Iterator[dict[Any, Any]]:
        """Random actions of the agents that act, the same ones for the same seed; masked ones are left out."""
        spaces: dict[Any, Any] = {}
        while True:
            for agent in self.acting:
                if agent not in spaces:
                    spaces[agent] = self._space(agent)
                    own = np.random.SeedSequence([seed, *repr(agent).encode()])
                    spaces[agent].seed(int(own.generate_state(1)[0] >> 1))
            masks = {agent: self._masks.get(agent) for agent in self.acting}
            yield {
                agent: spaces[agent].sample() if mask is None else spaces[agent].sample(mask)
                for agent, mask in masks.items()
            }

    def _space(self, agent: Any) -> Any:
        """A copy of the action space of an agent.

        Raises:
            CheckStopped: it has none, which the check of its episodes reports.
        """
        try:
            space = self.env.get_action_space(agent)
        except Exception as error:  # the environment's own code
            raise CheckStopped(f"agent {agent!r} has no action space: {error}") from error
        if not isinstance(space, Space):
            raise CheckStopped(f"the action space of agent {agent!r} is {space!r}")
        return copy.deepcopy(space)

    def close(self) -> None:
        self.env.close()


class AgentActions:
    """Actions by agent as JSON: for each step a list of pairs of agent and action."""

    def __init__(self, env: MultiAgentEnv) -> None:
        self._env = env

    def to_jsonable(self, steps: Sequence[Mapping[Any, Any]]) -> list[list[list[Any]]]:
        """Lists that `from_jsonable` reads.

        Raises:
            UsageError: an agent is neither text nor a whole number.
        """
        odd = [agent for actions in steps for agent in actions if type(agent) not in (str, int)]
        if odd:
            raise UsageError(f"a recording names agents by text or whole numbers, not by {odd[0]!r}")
        return [
            [[agent, self._env.get_action_space(agent).to_jsonable([action])[0]] for agent, action in actions.items()]
            for actions in steps
        ]

    def from_jsonable(self, steps: Sequence[Sequence[Sequence[Any]]]) -> list[dict[Any, Any]]:
        """The actions of lists of `to_jsonable`."""
        return [
            {agent: self._env.get_action_space(agent).from_jsonable([action])[0] for agent, action in actions}
            for actions in steps
        ]


def playable(make: Callable[[], Any]) -> Callable[[], Any]:
    """The same creator; environments of several agents come as `AgentsAsOne`."""

    def made() -> Any:
        env = make()
        several = multi_agent_env_of(env)
        return env if several is None else AgentsAsOne(several)

    return made


def mask_of(observation: Any, infos: Any, agent: Any) -> np.ndarray | None:
    """The mask of legal actions, from the observation or the info of an agent; None if there is none."""
    info = infos.get(agent) if isinstance(infos, Mapping) else None
    for given in (observation, info):
        if isinstance(given, Mapping) and given.get(MASK) is not None:
            return np.array(given[MASK], np.int8)
    return None
