"""The role of remote runners: an `EnvRunner` in a process of its own."""

from __future__ import annotations

from typing import Any

from rlmesh import current_worker, rpc
from rlmesh.envs.runners.env_runner import EnvRunner
from rlmesh.errors import UsageError

__all__ = ["RemoteEnvRunner", "StaleWeights"]


class StaleWeights(UsageError):
    """The runner has other weights than the call expects; it has restarted since it received them."""


class RemoteEnvRunner:
    """A member of the role that an `EnvRunnerGroup` starts; its methods are those of its `EnvRunner`."""

    def setup(self) -> None:
        import cloudpickle

        worker = current_worker()
        use_one_thread()
        given = cloudpickle.loads(worker.job_info.user_config["runner"])
        self.runner = EnvRunner(**given, worker_index=worker.rank + 1, start=worker.incarnation)

    @rpc
    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> Any:
        """See `EnvRunner.sample`."""
        return self.runner.sample(num_steps, num_episodes=num_episodes)

    @rpc
    def sample_with_stats(
        self, num_steps: int | None = None, *, num_episodes: int | None = None, version: int | None = None
    ) -> Any:
        """A batch and its statistics; None if the weights are not those of this version."""
        if version is not None and self.runner.weights_version != version:
            return None
        return self.runner.sample_with_stats(num_steps, num_episodes=num_episodes)

    @rpc
    def set_weights(self, weights: Any, version: int | None = None) -> None:
        """See `EnvRunner.set_weights`."""
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

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.stop()


def use_one_thread() -> None:
    """Let torch, if it is there, use one thread: runners share the cores, and their networks are small."""
    try:
        import torch
    except ModuleNotFoundError:
        return
    torch.set_num_threads(1)
