"""Built-in algorithms by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.algorithms.algorithm import Algorithm

__all__ = ["ALGORITHMS", "get_algorithm_class"]

ALGORITHMS = {
    "A2C": "rlmesh.envs.algorithms.pg",
    "APPO": "rlmesh.envs.algorithms.impala",
    "BC": "rlmesh.envs.algorithms.marwil",
    "DQN": "rlmesh.envs.algorithms.dqn",
    "IMPALA": "rlmesh.envs.algorithms.impala",
    "MARWIL": "rlmesh.envs.algorithms.marwil",
    "PG": "rlmesh.envs.algorithms.pg",
    "PPO": "rlmesh.envs.algorithms.ppo",
    "SAC": "rlmesh.envs.algorithms.continuous",
    "TD3": "rlmesh.envs.algorithms.continuous",
    "VPG": "rlmesh.envs.algorithms.pg",
}
"""Modules of the built-in algorithms; ``NameConfig`` beside ``Name`` has the settings."""


def get_algorithm_class(name: str) -> type[Algorithm]:
    """The built-in algorithm of a name, such as ``"PPO"``.

    Raises:
        UsageError: there is none; names the nearest one.
    """
    if name not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {name!r}.{did_you_mean(name, ALGORITHMS)}")
    return getattr(import_module(ALGORITHMS[name]), name)  # type: ignore[no-any-return]
