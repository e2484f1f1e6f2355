"""`EpisodeSpread`: plays episodes that are not trained on, such as those of a validation, with all engines.

The run's buffer requests the episodes to train on (`rlmesh.rl.rollout.episodes.engines`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh.errors import PeerLost, Restarting, StaleIncarnation, WeightsNotReady
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.episodes.tasks import SEEDS, EpisodeTask
from rlmesh.rl.types import Episode, Group

__all__ = ["EpisodeSpread", "episode_report"]

logger = logging.getLogger(__name__)

ATTEMPTS = 6
DEATHS = (PeerLost, Restarting, StaleIncarnation)
MOST_TOLD = 3


class EpisodeSpread:
    """Distributes episodes over the engines.

    Args:
        engines: returns the members that can play now (:class:`rlmesh.rl.roles.sampling.SamplingRole`).
        push_again: pushes weights to engines that have none.
    """

    def __init__(self, engines: Callable[[], Any], push_again: Callable[[], None]) -> None:
        self._engines, self._push_again = engines, push_again

    def make(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> list[list[Episode]]:
        """An episode per prompt; several if its agent opened branches.

        Args:
            rows: the row of each prompt.
            params: parameters of each turn; the seeds of the episodes are derived from their seed.

        Raises:
            RuntimeError: the engines could not play all episodes: they have no weights, or died in several attempts.
        """
        seed = params.seed
        tasks = [
            EpisodeTask(
                number, np.asarray(ids, np.int32), row, None if seed is None else (seed * 1_000_003 + number) % SEEDS
            )
            for number, (ids, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        found: dict[int, list[Episode]] = {}
        left = tasks
        for attempt in range(ATTEMPTS):
            if attempt:
                self._push_again()  # an engine has restarted or slept since the push
            left = self._attempt(left, params, found)
            if not left:
                return [found[task.number] for task in tasks]
        raise RuntimeError(f"{len(left)} of {len(tasks)} episodes were not played: the engines died, or had no weights")

    def _attempt(
        self, tasks: Sequence[EpisodeTask], params: SamplingParams, found: dict[int, list[Episode]]
    ) -> list[EpisodeTask]:
        """Play episodes; returns those that must be played again."""
        # Not idempotent: a death must raise here and be counted, instead of a silent second call.
        engines = self._engines().options(return_exceptions=True, idempotent=False)
        count = len(engines)
        parts = [list(tasks[rank::count]) for rank in range(count)]
        try:
            outcomes = engines.call("make_episodes", parts, [params] * count, _scatter=True).result()
        except WeightsNotReady as error:
            outcomes = [error] * count
        again: list[EpisodeTask] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, (*DEATHS, WeightsNotReady)):
                again += part
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                found |= {task.number: episodes for task, episodes in zip(part, outcome, strict=True)}
        return sorted(again, key=lambda task: task.number)


def episode_report(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of episodes: turns per episode, the share of failed episodes, and the number of branches.

    The failures of some episodes are logged."""
    episodes = Group.episodes_of(groups)
    failures = [episode.failure for episode in episodes if episode.failure]
    for failure in failures[:MOST_TOLD]:
        logger.warning("%s", failure)
    if len(failures) > MOST_TOLD:
        logger.warning("%d more episodes failed", len(failures) - MOST_TOLD)
    return {
        "episodes/turns": float(np.mean([episode.extras.get("turns", 0) for episode in episodes])),
        "episodes/failed": len(failures) / max(len(episodes), 1),
        "episodes/branches": float(sum("branch" in episode.extras for episode in episodes)),
    }
