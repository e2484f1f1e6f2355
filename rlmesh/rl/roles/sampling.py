"""`SamplingRole`: the common part of roles with a rollout engine: samples responses, and plays episodes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from rlmesh import current_worker, rpc
from rlmesh.errors import UsageError
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from rlmesh.rl.roles.device_turns import DeviceTurns
from rlmesh.rl.rollout.episodes.maker import EpisodeMaker
from rlmesh.rl.rollout.episodes.plan import EpisodePlan
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.types import Episode

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["ROLLOUT", "SamplingRole", "submit_groups"]

logger = logging.getLogger(__name__)

ROLLOUT = "rollout"
"""The name of the rollout engine among the parts that take turns."""
SAMPLE_S = 24 * 3600.0
"""Seconds after which a response is given up that no other limit has ended."""
LOST_CODE = 70
"""Exit code of a member whose engine lost its own process."""
SEEDS = 1009
"""Seeds per call. Engine n takes the n-th of them, so that no two engines or calls share a seed."""
_MAKING = threading.Lock()
"""Lets concurrent calls share one maker: from Python 3.12 on, `cached_property` has no lock."""


class SamplingRole:
    """The methods of a role that samples with a rollout engine."""

    run_settings: Run
    turns: DeviceTurns

    def sampling_engine(self) -> RolloutEngine:
        """The engine of this member."""
        raise NotImplementedError

    def add_engine(self) -> None:
        """Add the new engine to the parts that take turns, and end this process if the engine loses its own."""
        engine = self.sampling_engine()
        if hasattr(engine, "on_lost"):
            engine.on_lost = end_process
        # Level 2 drops the weights: after each sleep, a push comes before the next sample.
        self.turns.add(ROLLOUT, wake=engine.wake, sleep=lambda: engine.sleep(2))

    @rpc
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """One sample per prompt. The engine's seed is derived from the call's seed and the rank."""
        seed = None if params.seed is None else params.seed * SEEDS + current_worker().rank
        with self.turns.turn(ROLLOUT):
            return self.sampling_engine().generate(prompts, dataclasses.replace(params, seed=seed))

    @rpc
    def sample_in_turn(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        """The samples of each request, with the requests' own seeds, on an engine that shares its devices."""
        with self.turns.turn(ROLLOUT):
            futures = submit_groups(self.sampling_engine(), requests, params)
            try:
                samples = iter([future.result(SAMPLE_S) for future in futures])
            finally:
                for future in futures:
                    future.cancel()
        return [[next(samples) for _ in request.seeds] for request in requests]

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
        maker, tasks = await asyncio.to_thread(lambda: self.episode_maker), _tasks_of(requests)
        return _by_request(requests, await asyncio.wrap_future(maker.start(tasks, params)))

    @rpc
    def play_groups_in_turn(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Episode]]:
        """As `play_groups`, for an engine that shares its devices."""
        with self.turns.turn(ROLLOUT):
            return _by_request(requests, self.episode_maker.make(_tasks_of(requests), params))


def end_process(why: str) -> None:
    """End this process, since the engine's own process has ended: a restart of the member starts a new one."""
    logger.critical("%s", why)
    logging.shutdown()
    os._exit(LOST_CODE)


def submit_groups(
    engine: RolloutEngine, requests: Sequence[GroupRequest], params: SamplingParams
) -> list[Future[Sample]]:
    """Submit the responses of requests to an engine; returns one future per response, in order."""
    prompts = [request.prompt for request in requests for _ in request.seeds]
    each = [params.seeded(seed) for request in requests for seed in request.seeds]
    submit_all = getattr(engine, "submit_all", None)
    if submit_all is None:
        return [engine.submit(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    found: list[Future[Sample]] = submit_all(prompts, each)
    return found


def _tasks_of(requests: Sequence[GroupRequest]) -> list[EpisodeTask]:
    return [task for request in requests for task in EpisodeTask.of(request)]


def _by_request(requests: Sequence[GroupRequest], played: list[list[Episode]]) -> list[list[Episode]]:
    """The episodes of each request, given those of each task."""
    made = iter(played)
    return [[episode for _ in request.seeds for episode in next(made)] for request in requests]
