"""`make_runner`: the runner of an environment of any kind."""

from __future__ import annotations

from typing import Any

from rlmesh.envs.environments.registry import EnvContext, EnvCreator, env_creator_of
from rlmesh.envs.external.spec import ExternalEnv
from rlmesh.envs.multi_agent.pettingzoo_env import multi_agent_env_of
from rlmesh.envs.runners.env_runner import EnvRunner

__all__ = ["make_runner"]


class _GivesFirst:
    """A creator whose first environment is there already."""

    def __init__(self, creator: EnvCreator, first: Any) -> None:
        self._creator, self._first = creator, first

    def __call__(self, context: EnvContext) -> Any:
        first, self._first = self._first, None
        return self._creator(context) if first is None else first


def make_runner(
    env_creator: Any, policy_class: Any, *, policies: Any = None, policy_mapping_fn: Any = None, **arguments: Any
) -> Any:
    """An `EnvRunner`; a `MultiAgentEnvRunner` if policies are given or the environment has several agents; or an
    `ExternalEnvRunner` for an external environment."""
    several = policies is not None or policy_mapping_fn is not None
    creator = env_creator
    if isinstance(env_creator, ExternalEnv):
        from rlmesh.envs.external.runner import ExternalEnvRunner

        if not several:
            return ExternalEnvRunner(env_creator, policy_class, **arguments)
    elif not several and not hasattr(creator := env_creator_of(env_creator), "env_id"):  # ids are of one agent
        place = {name: arguments.get(name, 0) for name in ("worker_index", "num_workers")}
        first = creator(EnvContext(arguments.get("env_config"), **place))
        several = multi_agent_env_of(first) is not None
        creator = _GivesFirst(creator, first)
    if several:
        from rlmesh.envs.multi_agent.runner import MultiAgentEnvRunner

        more = {"policies": policies, "policy_mapping_fn": policy_mapping_fn}
        return MultiAgentEnvRunner(creator, policy_class, **more, **arguments)
    return EnvRunner(creator, policy_class, **arguments)
