"""The role of remote runners: an `EnvRunner` in a process of its own."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rlmesh import current_worker, rpc
from rlmesh.envs.environments.local_vector import env_seed
from rlmesh.envs.runners.creation import make_runner
from rlmesh.errors import UsageError

__all__ = ["RemoteEnvRunner"]

MOST_CLIENTS = 256
"""Calls of clients that are answered at once; further ones wait."""
GLOBAL_GENERATORS = 0xFFFE
"""The place of the generators of the process among the environments, for their seed."""


class RemoteEnvRunner:
    """A member of the role that an `EnvRunnerGroup` starts; its methods are those of its `EnvRunner`."""

    _offered: tuple[Any, int] | None = None

    def setup(self) -> None:
        import cloudpickle

        worker = current_worker()
        given = cloudpickle.loads(worker.job_info.user_config["runner"])
        if given.get("seed") is not None:  # environments that draw from the process's generators repeat too
            seed = env_seed(given["seed"], worker.rank + 1, GLOBAL_GENERATORS, worker.incarnation)
            random.seed(seed)
            np.random.seed(seed & 0xFFFF_FFFF)
            if (torch := sys.modules.get("torch")) is not None:
                torch.manual_seed(seed)
        self.runner = make_runner(**given, worker_index=worker.rank + 1, start=worker.incarnation)

    @rpc
    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> Any:
        """See `EnvRunner.sample`."""
        return self.runner.sample(num_steps, num_episodes=num_episodes)

    @rpc
    def sample_with_stats(
        self, num_steps: int | None = None, *, num_episodes: int | None = None, version: int | None = None
    ) -> Any:
        """A batch and its statistics; None if the weights are neither those of this version nor set by hand."""
        has, own = self.runner.has_weights, self.runner.weights_version
        if version is not None and own != version and not (has and own < 0):
            return None
        return self.runner.sample_with_stats(num_steps, num_episodes=num_episodes)

    @rpc
    def sample_fragment(self, num_steps: int) -> Any:
        """A batch, its statistics, the number of the weights, and what connectors learnt; None without any weights.

        The newest weights that were offered are taken over before.
        """
        offered, self._offered = self._offered, None
        if offered is not None and offered[1] > self.runner.weights_version:
            self.runner.set_weights(*offered)
        if not self.runner.has_weights:
            return None
        batch, stats = self.runner.sample_with_stats(num_steps)
        connectors = self.runner.connectors
        return batch, stats, self.runner.weights_version, connectors.take_delta() if connectors else None

    @rpc
    async def offer_weights(self, weights: Any, version: int) -> None:
        """Keep weights until the next fragment begins; this call does not wait for the fragment of now."""
        self._offered = (weights, version)

    @rpc
    def set_weights(self, weights: Any, version: int | None = None) -> None:
        """See `EnvRunner.set_weights`."""
        if version is None:  # weights that were offered before do not replace those that are set by hand
            self._offered = None
        self.runner.set_weights(weights, version)

    @rpc
    def get_weights(self) -> Any:
        """See `EnvRunner.get_weights`."""
        return self.runner.get_weights()

    @rpc
    def apply(self, pickled: bytes) -> Any:
        """Call a function, pickled by cloudpickle, with the runner."""
        import cloudpickle

        return cloudpickle.loads(pickled)(self.runner)

    @rpc(concurrent=MOST_CLIENTS)  # also while `sample` waits for clients
    def external_clients(self) -> int:
        """See `ExternalEnvRunner.clients`."""
        return int(self._external().clients())

    @rpc
    async def attend(self, client: str) -> AsyncIterator[bool]:
        """See `ExternalEnvRunner.attend`."""
        async for item in self._external().attend(client):
            yield item

    @rpc(concurrent=MOST_CLIENTS)
    def external(self, client: str, method: str, *args: Any) -> Any:
        """See `ExternalEnvRunner.call`."""
        return self._external().call(client, method, *args)

    def _external(self) -> Any:
        if not hasattr(self.runner, "attend"):
            raise UsageError("the environment of this job is no ExternalEnv: clients cannot connect to it")
        return self.runner

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.stop()
