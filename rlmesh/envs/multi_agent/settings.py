"""Checks of the settings of several agents, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.multi_agent.policies import policy_specs
from rlmesh.errors import UsageError

__all__ = ["multi_agent_problems", "trains"]

STEPS = ("env_steps", "agent_steps")


def multi_agent_problems(values: Mapping[str, Any]) -> list[str]:
    """The faults of the settings of ``multi_agent(…)``."""
    try:
        specs = policy_specs(values["policies"])
    except UsageError as error:
        return [str(error)]
    found = []
    mapping, to_train = values["policy_mapping_fn"], values["policies_to_train"]
    if mapping is not None and not callable(mapping):
        found.append(f"policy_mapping_fn: a function of agent_id and episode, not {mapping!r}")
    elif mapping is not None and _positional(mapping) == 0:
        found.append("policy_mapping_fn: a function of agent_id and episode; this one takes no argument")
    if to_train is not None and not callable(to_train):
        if isinstance(to_train, str) or not isinstance(to_train, Iterable):
            found.append(f"policies_to_train: names of policies, or a function of a name and a batch, not {to_train!r}")
        else:
            found += [
                f"policies_to_train: there is no policy {name!r}.{did_you_mean(str(name), specs)}"
                for name in to_train
                if not isinstance(name, str) or name not in specs
            ]
    if isinstance(values["connectors"], Mapping):
        found += [
            f"connectors: there is no policy {name!r}.{did_you_mean(str(name), specs)}"
            for name in values["connectors"]
            if name not in specs
        ]
    if values["count_steps_by"] not in STEPS:
        hint = did_you_mean(str(values["count_steps_by"]), STEPS)
        found.append(f"count_steps_by: there is no {values['count_steps_by']!r}.{hint}")
    return found


def counting_problems(values: Mapping[str, Any]) -> list[str]:
    """The faults of ``count_steps_by`` for algorithms that count steps of environments only."""
    if values["count_steps_by"] == "env_steps":
        return []
    return [
        "count_steps_by: this algorithm counts steps of environments; leave it out, and set train_batch_size to the "
        "agents' steps divided by the number of agents"
    ]


def _positional(fn: Any) -> int:
    """Number of arguments that a function takes by their places; many if that is not known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(2 if p.kind is p.VAR_POSITIONAL else p.kind in (0, 1) for p in parameters)


def trains(to_train: Any, policy_id: str, batch: Any = None) -> bool:
    """True if ``policies_to_train`` has a policy; None has all."""
    if to_train is None:
        return True
    return bool(to_train(policy_id, batch) if callable(to_train) else policy_id in to_train)
