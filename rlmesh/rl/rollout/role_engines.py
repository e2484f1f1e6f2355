"""`RoleEngines`: the engines of a job's role, for a `Sampler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rlmesh.errors import PeerLost, Restarting, SourceRestarted, StaleIncarnation, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.requests import ErrorKind, GroupRequest
from rlmesh.rl.types import Episode

__all__ = ["LOST", "OwnSampling", "RoleEngines", "push_until_taken"]

LOST = (PeerLost, StaleIncarnation, Restarting)
"""Errors of calls to a member whose process died, or was replaced."""


class RoleEngines:
    """The members of a role that samples.

    Args:
        group: the members.
        params: of sampling; the seeds come with the requests.
        in_turn: the members share their devices with other roles, and take turns.
    """

    def __init__(self, group: Any, params: SamplingParams, *, in_turn: bool) -> None:
        self._group, self._params = group, params
        self._method = "sample_in_turn" if in_turn else "sample"

    def ranks(self) -> Sequence[int]:
        ranks: Sequence[int] = self._group.ranks
        return ranks

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        place = list(self._group.ranks).index(rank)
        bare = [replace(request, row={}) for request in requests]  # engines need no rows
        future: Future[Any] = self._group[place].call(self._method, bare, self._params)
        return future

    def episodes(self, result: Any) -> list[list[Episode]]:
        return [[Episode.of(sample) for sample in samples] for samples in result]

    def kind_of(self, error: BaseException) -> ErrorKind:
        if isinstance(error, WeightsNotReady):
            return "no weights"
        return "died" if isinstance(error, LOST) else "error"


class OwnSampling:
    """A trainer's own method of sampling in the place of engines, which samples whole rounds on the caller's thread.

    Args:
        generate: (prompts, seed) → one episode per prompt.
    """

    def __init__(self, generate: Callable[[list[list[int]], int], list[Episode]]) -> None:
        self._generate = generate

    def ranks(self) -> Sequence[int]:
        return (0,)

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        prompts = [request.prompt for request in requests for _ in request.seeds]
        future: Future[Any] = Future()
        episodes = iter(self._generate(prompts, requests[0].seeds[0]))
        future.set_result([[next(episodes) for _ in request.seeds] for request in requests])
        return future

    def episodes(self, result: Any) -> list[list[Episode]]:
        found: list[list[Episode]] = result
        return found

    def kind_of(self, error: BaseException) -> ErrorKind:
        return "error"


def push_until_taken(
    push: Callable[[], object], attempts: int, *, hold: Callable[[], object], release: Callable[[], object]
) -> None:
    """Make a push, and make it again if an engine is lost meanwhile: the next attempt waits for its return.

    Args:
        push: makes it.
        attempts: the most of them.
        hold: called before each attempt; lets the engines keep the devices that they share.
        release: called when an engine was lost; ends what ``hold`` began.

    Raises:
        WeightSyncError: the push failed for another reason, or in all attempts.
    """
    for attempt in range(attempts):
        hold()
        try:
            push()
            return
        except SourceRestarted:
            raise
        except WeightSyncError as error:
            lost = error.receiver is not None or isinstance(error.__cause__, LOST)
            if not lost or attempt == attempts - 1:
                raise
            release()
