"""The runner of an environment: one for one agent, another for several."""

from __future__ import annotations

from typing import Any

from rlmesh.envs.environments.registry import EnvContext, EnvCreator, env_creator_of
from rlmesh.envs.multi_agent.pettingzoo_env import multi_agent_env_of
from rlmesh.envs.multi_agent.runner import MultiAgentEnvRunner
from rlmesh.envs.runners.env_runner import EnvRunner

__all__ = ["AnyRunner", "make_runner"]

AnyRunner = EnvRunner | MultiAgentEnvRunner


class _GivesFirst:
    """A creator whose first environment is there already."""

    def __init__(self, creator: EnvCreator, first: Any) -> None:
        self._creator, self._first = creator, first

    def __call__(self, context: EnvContext) -> Any:
        first, self._first = self._first, None
        return self._creator(context) if first is None else first


def make_runner(env_creator: Any, *, policies: Any = None, policy_mapping_fn: Any = None, **given: Any) -> AnyRunner:
    """A `MultiAgentEnvRunner` if policies are given or the environment has several agents, otherwise an `EnvRunner`.

    Args:
        env_creator: see `EnvRunner`.
        given: further arguments of the runner.
    """
    creator = env_creator_of(env_creator)
    several = policies is not None or policy_mapping_fn is not None
    if not several and not hasattr(creator, "env_id"):  # ids of Gymnasium have one agent
        context = EnvContext(
            given.get("env_config"), worker_index=given.get("worker_index", 0), num_workers=given.get("num_workers", 0)
        )
        first = creator(context)
        several = multi_agent_env_of(first) is not None
        creator = _GivesFirst(creator, first)
    if several:
        return MultiAgentEnvRunner(creator, policies=policies, policy_mapping_fn=policy_mapping_fn, **given)
    return EnvRunner(creator, **given)
