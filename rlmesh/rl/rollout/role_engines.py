"""`RoleEngines`: the engines of a job's role, for a `Sampler`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlmesh import RoleGroup, WeightSync
from rlmesh.errors import (
    CallError,
    CallTimeout,
    PeerLost,
    Restarting,
    SourceRestarted,
    StaleIncarnation,
    WeightsNotReady,
    WeightSyncError,
)
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.requests import ErrorKind, GroupRequest
from rlmesh.rl.types import Episode

__all__ = ["LOST", "PUSHES", "OwnSampling", "RoleEngines", "kind_of", "progress_of", "push_to_all", "serving"]

LOST = (PeerLost, StaleIncarnation, Restarting)
"""Errors of calls to a member whose process died or was replaced."""
PUSHES = 5
"""The most attempts of a push during which engines die."""
PROGRESS_S = 5.0
"""Seconds to wait for an engine's progress counter."""
CRASH = re.compile(r"exited with code|killed by SIG(?:ABRT|BUS|FPE|ILL|SEGV|SYS|TRAP)\b|\(out of memory")
"""Matches a `PeerLost.reason` whose cause may be a prompt. Other signals come from outside."""


class RoleEngines:
    """The members of a role that samples.

    Args:
        group: the members.
        params: parameters of sampling; the seeds come with the requests.
        in_turn: True if the members share their devices with other roles, and take turns.
        sync: pushes weights to the members; None: pushes go to all of them.
    """

    def __init__(self, group: Any, params: SamplingParams, *, in_turn: bool, sync: WeightSync | None = None) -> None:
        self._group, self._params, self._sync = group, params, sync
        self._method = "sample_in_turn" if in_turn else "sample"

    def ranks(self) -> Sequence[int]:
        ranks: Sequence[int] = self._group.ranks
        return ranks if self._sync is None else _served_ranks(self._group, self._sync)

    def returned(self) -> bool:
        return self._sync is not None and bool(self._sync.returned)

    def place(self, rank: int) -> int:
        """The place of a member in the group.

        Raises:
            WeightsNotReady: it restarts, or has restarted since the last push; a call to it would wait for its return.
        """
        if self._sync is not None and rank not in self.ranks():
            raise WeightsNotReady(f"{self._group.role}:{rank} has restarted since the last push of weights")
        return list(self._group.ranks).index(rank)

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        place = self.place(rank)
        bare = [replace(request, row={}) for request in requests]  # engines need no rows
        future: Future[Any] = self._group[place].call(self._method, bare, self._params)
        return future

    def episodes(self, result: Any) -> list[list[Episode]]:
        return [Episode.of_group(samples) for samples in result]

    def progress(self) -> dict[int, int]:
        return progress_of(self._group)

    def kind_of(self, error: BaseException) -> ErrorKind:
        return kind_of(error)


def _served_ranks(group: Any, sync: WeightSync) -> tuple[int, ...]:
    served = sync.served
    return tuple(rank for rank in group.ranks if f"{group.role}:{rank}" in served)


def serving(group: Any, sync: WeightSync) -> Any:
    """The members of a role that serve the weights pushed last; all members if none does."""
    ranks = _served_ranks(group, sync)
    if not ranks or len(ranks) == len(group):
        return group
    return RoleGroup(group.role, ranks=ranks).options(idempotent=True)


def progress_of(group: Any) -> dict[int, int]:
    """A counter per rank that changes while a member samples. Members that do not answer are left out."""
    # Not idempotent, and without a queue: a member that restarts is not waited for.
    quick, found = group.options(idempotent=False, queue=False, timeout_s=PROGRESS_S), {}
    asked = {rank: quick[place].call("tokens_sampled") for place, rank in enumerate(group.ranks)}
    for rank, answer in asked.items():
        with suppress(Exception):  # who waits only sees that nothing moves
            found[rank] = int(answer.result())
    return found


def kind_of(error: BaseException) -> ErrorKind:
    """The kind of an error of a call to a member."""
    if isinstance(error, WeightsNotReady):
        return "no weights"
    if not isinstance(error, LOST):
        return "error"
    if CallError.details(error).executed == "no":
        return "no weights"
    how = error.reason.partition("; its last lines")[0] if isinstance(error, PeerLost) else ""
    return "crashed" if CRASH.search(how) else "died"


def push_to_all(
    push: Callable[[], object], before: Callable[[], object], after: Callable[[], object], *, wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Push weights to all engines; repeat the push if an engine dies meanwhile or has not started yet.

    Args:
        push: makes one attempt, which waits for engines for some time.
        before: called before each attempt.
        after: called after each attempt that failed.
        wait_s: the most seconds to wait for engines that start: a large model takes minutes to load.
        clock: returns seconds.

    Raises:
        WeightSyncError: the push failed for another reason, engines died in `PUSHES` attempts, or did not start.
    """
    began, losses = clock(), 0
    while True:
        before()
        try:
            push()
            return
        except SourceRestarted:
            raise
        except WeightSyncError as error:
            cause = error.__cause__
            starts = isinstance(cause, CallTimeout) and CallError.details(cause).executed == "no"
            losses += not starts
            lost = error.receiver is not None or isinstance(cause, LOST)
            if not (starts and clock() - began < wait_s) and not (lost and losses < PUSHES):
                raise
        after()


class OwnSampling:
    """Lets a trainer's own function sample in place of engines: whole rounds, on the caller's thread.

    The seed of a round is the seed of its first response. The generators of Python, NumPy and torch are seeded with it
    too, so that a resumed run samples the same responses.

    Args:
        generate: function from prompts and a seed to one episode per prompt.
    """

    def __init__(self, generate: Callable[[list[list[int]], int], list[Episode]]) -> None:
        self._generate = generate

    def ranks(self) -> Sequence[int]:
        return (0,)

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        from rlmesh.rl.checkpoints.state import seeded_generators

        prompts, seed = [request.prompt for request in requests for _ in request.seeds], requests[0].seeds[0]
        future: Future[Any] = Future()
        with seeded_generators(seed, ("DRAW",)):
            episodes = iter(self._generate(prompts, seed))
        future.set_result([[next(episodes) for _ in request.seeds] for request in requests])
        return future

    def returned(self) -> bool:
        return False

    def episodes(self, result: Any) -> list[list[Episode]]:
        found: list[list[Episode]] = result
        return found

    def progress(self) -> dict[int, int]:
        return {}

    def kind_of(self, error: BaseException) -> ErrorKind:
        return "error"
