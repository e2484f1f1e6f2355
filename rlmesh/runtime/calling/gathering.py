"""One future for the calls of a group: all results, or the first failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlmesh.errors import GroupCallError
from rlmesh.runtime.future import PENDING, Future, reject, resolve, transition
from rlmesh.runtime.process import clock


class GroupOutcomes(list[Any]):
    """Results of all members, errors in their places: what ``options(return_exceptions=True)`` gives.

    Attributes:
        ranks: the rank of the member that each of them comes from.
    """

    def __init__(self, outcomes: Iterable[Any] = (), ranks: Sequence[int] | None = None) -> None:
        super().__init__(outcomes)
        self.ranks = tuple(range(len(self))) if ranks is None else tuple(ranks)

    def raise_all(self) -> None:
        """Raise a `GroupCallError` if any member failed."""
        outcomes = dict(zip(self.ranks, self, strict=True))
        failures = {rank: value for rank, value in outcomes.items() if isinstance(value, Exception)}
        if failures:
            results = {rank: value for rank, value in outcomes.items() if rank not in failures}
            raise group_error(failures, results)


def group_error(failures: dict[int, Exception], results: dict[int, Any]) -> GroupCallError:
    error = GroupCallError(f"{len(failures)} of {len(failures) + len(results)} members failed", list(failures.values()))
    error.failures = failures
    error.results = results
    return error


_TOLD = 8
"""So many members of a group are named one by one."""


class _Gathered:
    """The calls of a group, as the origin of the future that waits for all."""

    def __init__(self, futures: Sequence[Future[Any]], *, plain: bool) -> None:
        self._futures, self._plain = futures, plain
        self._first = futures[0]._origin if futures else None
        self._since = clock.now()

    def describe(self) -> str:
        return self._text([future._described() for future in self._futures if not future.done()])

    def explain(self) -> str:
        return self._text([future.waiting_for() for future in self._futures if not future.done()])

    def _text(self, waiting: list[str]) -> str:
        age_s = clock.now() - self._since
        more = f"; and {len(waiting) - _TOLD} more" if len(waiting) > _TOLD else ""
        told = "; ".join(waiting[:_TOLD]) + more
        return f"{len(waiting)} of {len(self._futures)} members for {age_s:.1f} s: {told}"

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def woke(self, lag_ns: int, run_queue_ns: int) -> None:
        if self._first is not None:
            self._first.woke(lag_ns, run_queue_ns)

    def stay(self) -> None:
        pass  # Its members are passed on, each for itself.

    def want(self, *, blocks: bool = False) -> None:
        for future in self._futures:
            future._want()

    def settled(self) -> bool:
        return all(future.done() for future in self._futures)

    def members(self) -> Sequence[Future[Any]] | None:
        return self._futures if self._plain else None


def gather(
    futures: Sequence[Future[Any]], *, return_exceptions: bool = False, ranks: Sequence[int] | None = None
) -> Future[list[Any]]:
    """All results in order, or the first failure as soon as it is there."""
    whole: Future[list[Any]] = Future(_Gathered(futures, plain=not return_exceptions))
    left = len(futures)

    def one_done(future: Future[Any]) -> None:
        nonlocal left
        if not return_exceptions and whole._state is PENDING:
            error = future.exception()
            if error is not None:
                reject(whole, error)
        with transition:
            left -= 1
            last = left == 0
        if last and whole._state is PENDING:
            resolve(whole, collected() if return_exceptions else [f.result() for f in futures])

    def collected() -> GroupOutcomes:
        return GroupOutcomes(map(_outcome, futures), ranks)

    if not futures:
        whole.set_result(collected() if return_exceptions else [])
    for future in futures:
        future.heard()  # What fails is the whole.
        future.on_value(one_done)
    return whole


def _outcome(future: Future[Any]) -> Any:
    error = future.exception()
    return error if error is not None else future.result()
