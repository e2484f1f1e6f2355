"""Environments of EnvPool, which steps them in threads of its own, in C++."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rlmesh.envs.environments.gym_vector import GymVector
from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.errors import UsageError, import_fault

__all__ = ["EnvPoolVector"]


class EnvPoolVector(GymVector):
    """The environments of EnvPool under one id, behind the methods of `LocalVector`.

    EnvPool resets an environment in the step after the end of its episode, as Gymnasium's ``NextStep`` does. It takes
    seeds only where it is made, so `begin_again` makes the environments anew.

    Args:
        env_id: an id of ``envpool.list_all_envs()``.
        size: number of environments.
        seeds: ``seeds(start)`` is a list with the seed of each environment.
        config: keywords of ``envpool.make_gymnasium``, such as ``num_threads``.
        infos: collect infos.

    Raises:
        UsageError: EnvPool is not installed, its import fails, or it has no such id.
    """

    def __init__(
        self, env_id: str, size: int, seeds: Callable[[int], list[int]], *, config: Mapping[str, Any],
        infos: bool = False,
    ) -> None:  # fmt: skip
        try:
            envpool: Any = import_module("envpool")
        except Exception as error:  # a broken installation may raise anything
            fault = import_fault("envpool", error, "rlmesh[envpool]")
            raise UsageError(f"vectorize_mode='envpool': {fault}") from error
        known = envpool.list_all_envs()
        if env_id not in known:
            raise UsageError(f"EnvPool has no environment {env_id!r}.{did_you_mean(env_id, known, listed=False)}")
        if wrong := [name for name in ("num_envs", "batch_size", "seed") if name in config]:
            raise UsageError(
                f"env_config {wrong[0]!r}: runners set the number of environments and their seeds; leave it out"
            )

        def made(start: int) -> Any:
            with warnings.catch_warnings():  # of Gymnasium, about the bounds in EnvPool's own description of a space
                warnings.filterwarnings("ignore", message=".*precision lowered")
                pool = envpool.make_gymnasium(env_id, num_envs=size, seed=seeds(start), **config)
                assert pool.single_observation_space is not None  # made where it is first read
                return pool

        self._made = made
        super().__init__(self._made(0), infos=infos)

    def begin_again(self, start: int) -> None:
        self.env.close()
        self.env = self._made(start)
        super().begin_again(start)
