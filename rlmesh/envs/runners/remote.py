"""The role of remote runners: an `EnvRunner` in a process of its own."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rlmesh import current_worker, rpc
from rlmesh.envs.environments.local_vector import env_seed
from rlmesh.envs.runners.creation import make_runner
from rlmesh.envs.runners.kept_episodes import EpisodeKeeper, go_on
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
        self._keeper = EpisodeKeeper(self.runner)
        self._is_back = worker.incarnation > 0  # and was not told yet which episodes to go on with

    @rpc
    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> Any:
        """See `EnvRunner.sample`. The group does not know what was sampled, so it keeps no episodes from now on."""
        self._keeper.stop()
        return self.runner.sample(num_steps, num_episodes=num_episodes)

    @rpc
    def sample_with_stats(
        self, num_steps: int | None = None, *, num_episodes: int | None = None, version: int | None = None
    ) -> Any:
        """A batch, its statistics, and the runner's state after it, as of `EpisodeKeeper`.

        None if a ``version`` is given and the weights are neither of this version nor set by hand, or if this process
        replaces a dead one and `go_on` was not called yet.
        """
        has, own = self.runner.has_weights, self.runner.weights_version
        if version is not None and (self._is_back or (own != version and not (has and own < 0))):
            return None
        began = time.perf_counter()
        batch, stats = self.runner.sample_with_stats(num_steps, num_episodes=num_episodes)
        return batch, stats, self._keeper.after(time.perf_counter() - began)

    @rpc
    def sample_fragment(self, num_steps: int) -> Any:
        """A batch, its statistics, the number of the weights, what connectors learnt, and the runner's state after it.

        The newest weights that were offered are taken over before. None without any weights, or if this process
        replaces a dead one and `go_on` was not called yet.
        """
        if self._is_back:
            return None
        offered, self._offered = self._offered, None
        if offered is not None and offered[1] > self.runner.weights_version:
            self.runner.set_weights(*offered)
        if not self.runner.has_weights:
            return None
        began = time.perf_counter()
        batch, stats = self.runner.sample_with_stats(num_steps)
        sampled_s, connectors = time.perf_counter() - began, self.runner.connectors
        delta = connectors.take_delta() if connectors else None
        return batch, stats, self.runner.weights_version, delta, self._keeper.after(sampled_s)

    @rpc
    def take_delta(self) -> Any:
        """The statistics of connectors since the last call; None if `go_on` must be called first."""
        return None if self._is_back else self.runner.connectors.take_delta()

    @rpc
    def go_on(self, kept: bytes | None, delta_taken: bool) -> None:
        """Go on with the episodes of the dead process that this one replaces; a second call does nothing.

        Weights and shared statistics of connectors become those of that time: `set_weights` follows.
        """
        if self._is_back:
            self._is_back = False
            go_on(self.runner, kept, delta_taken)

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
