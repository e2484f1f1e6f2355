"""`AsyncSampler`: remote runners sample while the learner trains."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.errors import CallTimeout

if TYPE_CHECKING:
    from rlmesh import Future
    from rlmesh.envs.runners.env_runner_group import EnvRunnerGroup

__all__ = ["AsyncSampler", "SampledFragments", "staleness"]


logger = logging.getLogger(__name__)


@dataclass
class SampledFragments:
    """Fragments of several runners, in the order of their arrival.

    Attributes:
        batches: one per fragment.
        versions: number of the weights that each was sampled with.
    """

    batches: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Steps of environments in all fragments."""
        return sum(batch.env_steps() for batch in self.batches)

    def joined(self) -> Any:
        """One batch of all fragments."""
        return SampleBatch.concat_samples(self.batches)


def staleness(versions: Sequence[int], version: int) -> dict[str, float]:
    """How many updates the learner, with weights ``version``, is ahead of those that sampled: mean and maximum."""
    lags = [version - each for each in versions]
    return {"staleness_mean": sum(lags) / len(lags), "staleness_max": float(max(lags))}


class AsyncSampler:
    """Keeps ``ahead`` requests for fragments under way at each remote runner of a group.

    A runner samples its next fragment while the last one waits here, and stops when nobody takes its fragments: there
    are never more than ``ahead`` fragments per runner. Weights are sent beside the requests; a runner takes the newest
    ones before each fragment.

    A runner that dies comes back and samples its requests again, with weights that it is given first. It goes on with
    the episodes that the last fragment that was taken left under way, if its environments can be pickled. Each request
    is answered once, and what a dead process had sampled since is lost as a whole.

    Args:
        group: has remote runners.
        steps: steps of environments of a fragment, of all environments of a runner together.
        ahead: requests per runner.
    """

    def __init__(self, group: EnvRunnerGroup, steps: int, ahead: int) -> None:
        self._group, self._steps, self._ahead = group, steps, ahead
        group.samples_ahead = True
        self._members = [each.options(timeout_s=group.timeout_s, idempotent=True) for each in group.remote_workers]
        self._arrived: queue.SimpleQueue[tuple[int, int, Future[Any]]] = queue.SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._under_way = [0] * group.num_env_runners
        self._offers: list[tuple[int, Future[Any]] | None] = [None] * group.num_env_runners
        self._round = 0
        self._taken = SampledFragments()  # stays if an error interrupts `take`

    def take(self, rows: int) -> SampledFragments:
        """Fragments with at least ``rows`` steps, the oldest ones first.

        Raises:
            CallTimeout: no runner has sampled anything within the group's ``timeout_s``.
            FloatingPointError: an environment returned a number that is NaN or infinite.
        """
        taken = self._taken
        while taken.rows < rows:
            self._ask_all()
            index, result = self._next()
            if result is None:  # the runner restarted
                self._group.go_on(index)
                self._offer(index)
                offer = self._offers[index]
                assert offer is not None
                offer[1].result()
                continue
            batch, stats, version, delta, state = result
            self._group.episodes.keep(index, state)
            taken.batches.append(batch)
            taken.versions.append(version)
            self._group.add_stats(stats)
            if delta:
                self._group.local_env_runner.connectors.merge([delta])
            self._offer_if_newer(index)
        self._taken = SampledFragments()
        self._ask_all()  # now, so that no runner waits for work while the learner trains
        return taken

    def _ask_all(self) -> None:
        for index in range(len(self._under_way)):
            while self._under_way[index] < self._ahead:
                self._ask(index)

    def _ask(self, index: int) -> None:
        future = self._members[index].call("sample_fragment", self._steps)
        self._under_way[index] += 1
        self._waiting.add(future)
        round_ = self._round
        future.add_done_callback(lambda done: self._arrived.put((round_, index, done)))

    def _next(self) -> tuple[int, Any]:
        """The runner whose request is answered next, and the answer."""
        while True:
            try:
                round_, index, future = self._arrived.get(timeout=self._group.timeout_s)
            except queue.Empty:
                raise CallTimeout(
                    f"no runner has sampled a fragment of {self._steps} steps within {self._group.timeout_s:g} s"
                ) from None
            self._waiting.discard(future)
            if round_ == self._round:
                self._under_way[index] -= 1
                return index, future.result()
            future.exception()  # of a request that was dropped

    def publish(self) -> None:
        """Send the local runner's weights to all remote runners, and do not wait for them."""
        self._group.keep_weights()
        for index in range(len(self._under_way)):
            self._offer_if_newer(index)

    def _offer_if_newer(self, index: int) -> None:
        offer = self._offers[index]
        if offer is None:
            self._offer(index)
        elif offer[1].done():
            error = offer[1].exception()
            if error is not None:
                logger.warning("runner %d did not get the weights, and gets them again: %s", index + 1, error)
            if error is not None or offer[0] != self._group.kept_weights[1]:
                self._offer(index)

    def _offer(self, index: int) -> None:
        weights, version = self._group.kept_weights
        self._offers[index] = (version, self._members[index].call("offer_weights", weights, version))

    def drop(self) -> None:
        """Forget all requests: their fragments are dropped when they arrive, and no step of them is counted."""
        self._round += 1
        self._group.episodes.forget()
        self._under_way = [0] * len(self._under_way)
        self._taken = SampledFragments()
        self._offers = [None] * len(self._offers)

    def stop(self) -> None:
        """Cancel all requests."""
        for future in [*self._waiting, *(offer[1] for offer in self._offers if offer is not None)]:
            future.cancel()
