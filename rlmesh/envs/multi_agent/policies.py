"""Policies of several agents: their settings, which agent has which, and their spaces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.multi_agent.environment import MultiAgentEnv
from rlmesh.errors import UsageError

__all__ = ["AgentEpisode", "PolicyMapping", "PolicySpec", "policy_seed", "policy_specs", "spaces_of_policies"]

DEFAULT = "default_policy"


@dataclass(frozen=True)
class PolicySpec:
    """The settings of one of several policies that differ from those of the algorithm; None: they do not.

    Attributes:
        policy_class: a `Policy`, such as one of fixed rules that does not learn.
        observation_space, action_space: needed only if no agent has this policy at the start.
        config: settings of ``training`` and ``rl_module`` that differ, such as ``{"lr": 1e-4}``.
    """

    policy_class: type[Policy] | None = None
    observation_space: Any = None
    action_space: Any = None
    config: Mapping[str, Any] | None = None


@dataclass
class AgentEpisode:
    """The episode for which a ``policy_mapping_fn`` chooses policies, its second argument.

    Attributes:
        id_, episode_id: number of the episode, unique over all runners.
        env_id: place of the environment in its runner.
        policies: policies of the agents so far, by agent.
    """

    episode_id: int
    env_id: int = 0
    policies: dict[Any, str] = field(default_factory=dict)

    @property
    def id_(self) -> int:
        return self.episode_id


def policy_specs(given: Any) -> dict[str, PolicySpec]:
    """The policies of a ``multi_agent(policies=…)``: names, or a dict by name of `PolicySpec`, policy classes, tuples
    ``(policy_class, observation_space, action_space, config)``, or None.

    Raises:
        UsageError: the value has another form.
    """
    if given is None:
        return {DEFAULT: PolicySpec()}
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"policies: names, or a dict by name, not {given!r}")
    try:
        entries = (
            given if isinstance(given, Mapping) else dict.fromkeys(sorted(given) if isinstance(given, set) else given)
        )
    except TypeError:  # names that cannot be keys, or cannot be sorted
        raise UsageError(f"policies: names are text, not those of {given!r}") from None
    if not entries:
        raise UsageError("policies: name at least one policy")
    found = {}
    for name, value in entries.items():
        if not isinstance(name, str) or not name or name.startswith("__"):
            raise UsageError(f"policies: a policy's name is text, without __ at its start, not {name!r}")
        if value is None:
            found[name] = PolicySpec()
        elif isinstance(value, PolicySpec):
            found[name] = value
        elif isinstance(value, tuple | list) and len(value) == 4:
            found[name] = PolicySpec(*value)
        elif isinstance(value, type) and issubclass(value, Policy):
            found[name] = PolicySpec(value)
        else:
            raise UsageError(f"policies: {name!r} has a PolicySpec, a class of policies or None, not {value!r}")
    return found


class PolicyMapping:
    """Chooses the policy of an agent, once per episode of the agent.

    Args:
        fn: ``policy_mapping_fn(agent_id, episode)``; it may have the parameters ``worker`` or ``**kwargs`` too, and
            gets the runner then. None: the only policy, or, if agents and policies have the same names, that of the
            same name.
        policies: names of the policies.

    Raises:
        UsageError: the function chooses a policy that is not there.
    """

    def __init__(self, fn: Callable[..., str] | None, policies: Iterable[str]) -> None:
        self.fn, self.policies = fn, list(policies)
        self._extra: tuple[str, ...] = ()
        self._takes_episode = True
        if fn is not None:
            self._inspect(fn)

    def _inspect(self, fn: Callable[..., str]) -> None:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except ValueError:  # a builtin
            self._takes_episode = False
            return
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._takes_episode = len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if any(p.kind is p.VAR_KEYWORD or p.name == "worker" for p in parameters):
            self._extra = ("worker",)

    def __call__(self, agent_id: Any, episode: AgentEpisode, runner: Any = None) -> str:
        chosen: Any
        if self.fn is None:
            chosen = self.policies[0] if len(self.policies) == 1 else agent_id
            how = "without a policy_mapping_fn, several policies have the names of agents; set one: "
        else:
            arguments = (agent_id, episode) if self._takes_episode else (agent_id,)
            chosen = self.fn(*arguments, **dict.fromkeys(self._extra, runner))
            how = ""
        if chosen not in self.policies:
            raise UsageError(
                f"{how}policy_mapping_fn gives agent {agent_id!r} the policy {chosen!r}, which is not among the "
                f"policies.{did_you_mean(str(chosen), self.policies)}"
            )
        return str(chosen)


def spaces_of_policies(
    env: MultiAgentEnv, specs: Mapping[str, PolicySpec], mapping: PolicyMapping, runner: Any = None
) -> dict[str, tuple[Any, Any]]:
    """Observation and action space of each policy: those of its spec, or those of the agents that have it.

    A policy that no agent has at the start takes the spaces of all agents, if they agree.

    Raises:
        UsageError: the agents of a policy differ in their spaces, or a policy's spaces are not known.
    """
    episode = AgentEpisode(-1)
    agents = env.known_agents()
    spaces = {agent: (env.get_observation_space(agent), env.get_action_space(agent)) for agent in agents}
    owners: dict[str, list[Any]] = {}
    for agent in agents:
        episode.policies[agent] = mapping(agent, episode, runner)
        owners.setdefault(episode.policies[agent], []).append(agent)
    found = {}
    for name, spec in specs.items():
        own = owners.get(name) or agents
        if spec.observation_space is not None and spec.action_space is not None:
            found[name] = (spec.observation_space, spec.action_space)
            continue
        odd = next((agent for agent in own if spaces[agent] != spaces[own[0]]), None)
        if odd is not None and name in owners:
            raise UsageError(
                f"agents {own[0]!r} and {odd!r} have the policy {name!r} and differ in their spaces: "
                f"{spaces[own[0]]} and {spaces[odd]}. Give them policies of their own"
            )
        if odd is not None or not own:
            raise UsageError(
                f"no agent has the policy {name!r} at the start, so its spaces are not known: give "
                "PolicySpec(observation_space=…, action_space=…)"
            )
        observation_space, action_space = spaces[own[0]]
        found[name] = (spec.observation_space or observation_space, spec.action_space or action_space)
    return found


def policy_seed(seed: int, policy_id: str) -> int:
    """The seed of a policy's weights: a function of the run's seed and the policy's name."""
    return int(np.random.SeedSequence([seed, *policy_id.encode()]).generate_state(1)[0] >> 1)
