"""`make_runner`: the runner of an environment of any kind."""

from __future__ import annotations

from typing import Any

from rlmesh.envs.external.spec import ExternalEnv
from rlmesh.envs.runners.env_runner import EnvRunner

__all__ = ["make_runner"]


def make_runner(env_creator: Any, policy_class: Any, **arguments: Any) -> EnvRunner:
    """An `EnvRunner`, or an `ExternalEnvRunner` for an external environment."""
    if isinstance(env_creator, ExternalEnv):
        from rlmesh.envs.external.runner import ExternalEnvRunner

        return ExternalEnvRunner(env_creator, policy_class, **arguments)
    return EnvRunner(env_creator, policy_class, **arguments)
