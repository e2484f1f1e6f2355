"""`PlaysEpisodes`: the part of a role that plays episodes of several turns on its engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rlmesh import rpc
from rlmesh.errors import UsageError
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import RolloutEngine, SamplingParams
from rlmesh.rl.roles.turns import Turns
from rlmesh.rl.rollout.episodes.maker import EpisodeMaker
from rlmesh.rl.rollout.episodes.plan import EpisodePlan
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.types import Episode

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["ROLLOUT", "PlaysEpisodes"]

ROLLOUT = "rollout"
"""The name of the rollout engine among the parts that take turns."""
_MAKING = threading.Lock()
"""Lets concurrent calls share one maker: from Python 3.12 on, `cached_property` has no lock."""


class PlaysEpisodes:
    """The methods of a role with a rollout engine that play episodes of several turns."""

    run_settings: Run
    turns: Turns

    def sampling_engine(self) -> RolloutEngine:
        """The engine of this member."""
        raise NotImplementedError

    @property
    def episode_maker(self) -> EpisodeMaker:
        """Plays the episodes.

        Raises:
            UsageError: the run has episodes of one turn.
        """
        with _MAKING:
            return self._episode_maker

    @cached_property
    def _episode_maker(self) -> EpisodeMaker:
        plan = EpisodePlan.of(self.run_settings)
        if plan is None:
            raise UsageError("the run has no tools, no environment and no agent: its episodes have one turn")
        return EpisodeMaker(self.sampling_engine(), self.run_settings.tokenizer(), plan)

    def close_episodes(self) -> None:
        """End the endpoint and the loop of the episodes, if there are any."""
        if "_episode_maker" in self.__dict__:
            self.episode_maker.close()

    @rpc(concurrent=4)
    def tokens_sampled(self) -> int:
        """A counter that grows while the engine samples, also within a request."""
        return Growing.sampled

    @rpc
    def make_episodes(self, tasks: Sequence[EpisodeTask], params: SamplingParams) -> list[list[Episode]]:
        """The episodes of each task; see `EpisodeMaker.make`."""
        with self.turns.turn(ROLLOUT):
            return self.episode_maker.make(tasks, params)

    @rpc(concurrent=4096)
    async def play_groups(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Episode]]:
        """The episodes of each request, with the requests' own seeds.

        Calls run concurrently with each other and with pushes, so the engine must not share its devices.

        """
        tasks = [EpisodeTask.of(request) for request in requests]
        maker = await asyncio.to_thread(lambda: self.episode_maker)
        played = await asyncio.wrap_future(maker.start([task for own in tasks for task in own], params))
        made = iter(played)
        return [[episode for _ in own for episode in next(made)] for own in tasks]

    @rpc
    def play_groups_in_turn(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Episode]]:
        """As `play_groups`, for an engine that shares its devices."""
        tasks = [EpisodeTask.of(request) for request in requests]
        with self.turns.turn(ROLLOUT):
            made = iter(self.episode_maker.make([task for own in tasks for task in own], params))
        return [[episode for _ in own for episode in next(made)] for own in tasks]
