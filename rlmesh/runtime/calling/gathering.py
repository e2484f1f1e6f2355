"""One future for the calls of a group: all results, or the first failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from rlmesh.errors import GroupCallError
from rlmesh.runtime.future import PENDING, Future, transition
from rlmesh.runtime.process import clock

_SHOWN = 8
"""A message names no more members of a group than this."""
_result_of = attrgetter("_result")


class GroupOutcomes(list[Any]):
    """The results of all members, with errors in their places: the value of a call with ``return_exceptions=True``.

    Attributes:
        ranks: the rank of the member of each result.
    """

    def __init__(self, outcomes: Iterable[Any] = (), ranks: Sequence[int] | None = None) -> None:
        super().__init__(outcomes)
        self.ranks = tuple(range(len(self))) if ranks is None else tuple(ranks)

    def raise_all(self) -> None:
        """Raise a `GroupCallError` if any member failed."""
        outcomes = dict(zip(self.ranks, self, strict=True))
        failures = {rank: value for rank, value in outcomes.items() if isinstance(value, Exception)}
        if failures:
            error = GroupCallError(f"{len(failures)} of {len(self)} members failed", list(failures.values()))
            error.failures = failures
            error.results = {rank: value for rank, value in outcomes.items() if rank not in failures}
            raise error


class GatheredCalls:
    """The calls of a group, as the origin of the future that waits for all of them."""

    def __init__(self, futures: Sequence[Future[Any]], *, plain: bool) -> None:
        self.futures, self._plain = futures, plain
        self._first = futures[0]._origin if futures else None
        self._since = clock.now()

    def describe(self) -> str:
        return self._text([future._described() for future in self.futures if not future.done()])

    def explain(self) -> str:
        return self._text([future.waiting_for() for future in self.futures if not future.done()])

    def _text(self, waiting: list[str]) -> str:
        age_s = clock.now() - self._since
        more = f"; and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
        return f"{len(waiting)} of {len(self.futures)} members for {age_s:.1f} s: {'; '.join(waiting[:_SHOWN])}{more}"

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()

    def waiter_woke(self, lag_ns: int, run_queue_ns: int) -> None:
        if self._first is not None:
            self._first.waiter_woke(lag_ns, run_queue_ns)

    def leave_at_producer(self) -> None:
        pass  # A gathered future is passed on as its member futures, each of which is asked for itself.

    def value_needed(self, *, blocks: bool = False) -> None:
        for future in self.futures:
            future._need_value()

    def settled(self) -> bool:
        return all(future.done() for future in self.futures)

    def members(self) -> Sequence[Future[Any]] | None:
        return self.futures if self._plain else None


def gather(
    futures: Sequence[Future[Any]], *, return_exceptions: bool = False, ranks: Sequence[int] | None = None
) -> Future[list[Any]]:
    """A future with all results in order, or with the first failure as soon as there is one.

    Args:
        return_exceptions: give errors in the places of results, as `GroupOutcomes`.
        ranks: the ranks of the members; by default their positions.
    """
    whole: Future[list[Any]] = Future(GatheredCalls(futures, plain=not return_exceptions))
    left = len(futures)

    def one_done(future: Future[Any]) -> None:
        nonlocal left
        if not return_exceptions and future._exception is not None:
            whole.end(None, future.exception())
        with transition:
            left -= 1
            last = left == 0
        if last and whole._state is PENDING:
            whole.end(outcomes() if return_exceptions else [*map(_result_of, futures)], None)

    def outcomes() -> GroupOutcomes:
        return GroupOutcomes(map(_outcome, futures), ranks)

    if not futures:
        whole.set_result(outcomes() if return_exceptions else [])
    for future in futures:
        future.mark_retrieved()  # An error that nobody retrieves is logged by the gathered future, not by its parts.
        future.on_value(one_done)
    return whole


def _outcome(future: Future[Any]) -> Any:
    error = future.exception()
    return error if error is not None else future.result()
