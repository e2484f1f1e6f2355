"""`RunnerBase`: the methods that runners of one agent and of several have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from rlmesh.envs.environments.local_vector import env_seed
from rlmesh.envs.environments.registry import EnvContext
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.errors import UsageError

__all__ = [
    "DEFAULT_POLICY", "POLICY_PLACE", "LongEpisodes", "RunnerBase", "is_count", "require_one",
    "warn_of_other_environments",
]  # fmt: skip

logger = logging.getLogger(__name__)

DEFAULT_POLICY = "default_policy"
POLICY_PLACE = 0xFFFF
"""The place of a policy among the environments, for its seed."""


class RunnerBase:
    """Place, seeds, statistics and weights' number of a runner; a subclass defines `sample`.

    Args:
        num_envs, rollout_fragment_length, seed, worker_index, num_workers, start, env_config: as of `EnvRunner`.

    Attributes:
        policy_map: policies by id.

    Raises:
        UsageError: a number below 1.
    """

    policy_map: Any

    def __init__(
        self, *, num_envs: int, rollout_fragment_length: int, seed: int | None, worker_index: int, num_workers: int,
        start: int, env_config: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        for name, value in (("num_envs", num_envs), ("rollout_fragment_length", rollout_fragment_length)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{type(self).__name__}({name}={value!r}): a whole number of at least 1")
        self.worker_index, self.num_workers, self.start, self.seed = worker_index, num_workers, start, seed
        self.num_envs, self.rollout_fragment_length = num_envs, rollout_fragment_length
        self.env_config = dict(env_config or {})
        self.weights_version, self.has_weights = -1, False
        self._stats, self._must_reset = EpisodeStats(), True
        # 2 ** 22 runners, 2 ** 12 restarts, 2 ** 29 episodes: unique over all runners of a run.
        self._first_id = (worker_index << 41) | ((start & 0xFFF) << 29)

    def __call__(self) -> Self:
        """This runner: ``group.local_worker()`` was a method in older versions."""
        return self

    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> Any:
        """A batch of steps."""
        raise NotImplementedError(f"{type(self).__name__} has no sample")

    def sample_with_stats(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> Any:
        """A batch, and the statistics of the episodes that ended in it."""
        return self.sample(num_steps, num_episodes=num_episodes), self.take_stats()

    def take_stats(self) -> EpisodeStats:
        """Statistics since the last call."""
        stats, self._stats = self._stats, EpisodeStats()
        return stats

    def begin_episodes(self) -> None:
        """Drop the episodes that go on: the next `sample` begins new ones."""
        self._must_reset = True

    def apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``fn(self, …)``."""
        return fn(self, *args, **kwargs)

    def _steps_of(self, num_steps: int | None, num_episodes: int | None) -> int:
        """The steps of each environment that a `sample` asks for; a wrong request is refused.

        Raises:
            UsageError: both arguments, or a number below 1; a runner that restarted has no weights yet.
        """
        own = any(type(policy).get_weights is not Policy.get_weights for policy in self.policy_map.values())
        if self.start and not self.has_weights and own:
            raise UsageError(
                f"runner {self.worker_index} was restarted and has its initial weights only: call its set_weights "
                "before its sample; EnvRunnerGroup.sample and sync_weights do that by themselves"
            )
        if num_steps is not None and num_episodes is not None:
            raise UsageError("sample: give num_steps or num_episodes, not both")
        wanted = num_episodes if num_episodes is not None else num_steps
        if wanted is not None and not is_count(wanted):
            raise UsageError(f"sample: a whole number of at least 1, not {wanted!r}")
        return self.rollout_fragment_length if num_steps is None else -(-num_steps // self.num_envs)

    def _with_seeds(self, config: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """A policy's settings, with the seeds of its weights and its actions; None: as they are."""
        if seed is not None:
            config.setdefault("model_seed", seed)
            config["seed"] = env_seed(seed, self.worker_index, POLICY_PLACE, self.start)
        return config

    def _context(self, index: int) -> EnvContext:
        return EnvContext(
            self.env_config, worker_index=self.worker_index, vector_index=index, num_workers=self.num_workers
        )

    def _seed_of(self, index: int, start: int, run: int | None = None) -> int:
        seed = self.seed if run is None else run
        assert seed is not None
        return env_seed(seed, self.worker_index, index, (self.start << 16) | start)


def require_one(policy: Policy, observations: Mapping[Any, Any]) -> None:
    """Raise `UsageError` if a policy with memory is to act for several observations, whose states nobody has."""
    if policy.is_recurrent() and len(observations) != 1:
        raise UsageError("a policy with memory acts for one observation at a time: call compute_single_action")


class LongEpisodes:
    """Warns once if no environment of a runner that plays whole episodes has ended one for `LONG` steps.

    Args:
        worker_index: of the runner.
    """

    LONG = 100_000

    def __init__(self, worker_index: int) -> None:
        self._index, self._steps, self._warned = worker_index, 0, False

    def after(self, steps: int, *, ended: bool) -> None:
        """Count steps of each environment."""
        self._steps = 0 if ended else self._steps + steps
        if self._steps >= self.LONG and not self._warned:
            self._warned = True
            logger.warning(
                "runner %d plays whole episodes, and no environment has ended one for %d steps. If they never end, "
                "neither does this call: give the environment a time limit, such as gymnasium.wrappers.TimeLimit",
                self._index, self._steps,
            )  # fmt: skip


def warn_of_other_environments(saved: int, here: int) -> None:
    """Say that a runner does not go on with the episodes of a state, which has another number of environments."""
    logger.warning("the state has %d environments, and this runner has %d: new episodes begin", saved, here)


def is_count(value: Any) -> bool:
    """True for whole numbers of at least 1, of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)
