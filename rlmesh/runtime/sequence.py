"""`FutureSequence`: the results of a batch call, as a sequence."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar, overload

from rlmesh.errors import CallError
from rlmesh.runtime.batch_results import what_is_wrong
from rlmesh.runtime.calling.gathering import gather
from rlmesh.runtime.calling.unretrieved import SharedReport
from rlmesh.runtime.future import Future
from rlmesh.wire.passed import ItemRange

T_co = TypeVar("T_co", covariant=True)


class PartOfSequence:
    """Items of a sequence as an argument of another call. They need not be there yet: the callee gets the items."""

    def __init__(self, touched: list[tuple[Future[Any], ItemRange]], shape: Callable[[list[Any]], Any]) -> None:
        self._touched, self._shape = touched, shape

    def __reduce__(self) -> tuple[Any, ...]:
        return _join, (self._shape, *(_Shard(future, part) for future, part in self._touched))


class _Shard:
    def __init__(self, future: Future[Any], part: ItemRange) -> None:
        self._future, self._part = future, part

    def __reduce__(self) -> tuple[Any, ...]:
        from rlmesh.runtime.calling.future_arguments import reduce_future

        return reduce_future(self._future, self._part)


def _join(shape: Callable[[list[Any]], Any], *shards: list[Any]) -> Any:
    return shape([item for shard in shards for item in shard])


class FutureSequence(Sequence[T_co]):
    """The results of a whole batch, in order, one per item of the batch.

    ``len`` is known at once. Indexes, negative indexes and slices work as on a list, and block only for the shards
    that they touch. A shard is the share of one member. ``await`` gives the list; ``async for`` and `as_completed` give
    items early.
    """

    def __init__(
        self, shards: Sequence[Future[Any]], sizes: Sequence[int], method: str = "call",
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._shards = list(shards)
        self._ranks = range(len(self._shards)) if ranks is None else ranks
        self._sizes = list(sizes)
        self._starts = [0, *accumulate(self._sizes)]
        self._method = method
        self._report = SharedReport()
        for shard in shards:
            shard.what = f"{method}()"
            shard.share_report(self._report)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is out of range for a batch of {len(self)} items")
        shard = bisect_right(self._starts, position) - 1
        item: T_co = self._shard(shard)[position - self._starts[shard]]
        return item

    def __iter__(self) -> Iterator[T_co]:
        for shard in range(len(self._shards)):
            yield from self._shard(shard)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        # The base class takes an IndexError of a member for the end of the sequence.
        return list(self).index(value, start, len(self) if stop is None else stop)

    def _shard(self, number: int) -> Any:
        try:
            return self._checked(number, self._shards[number].result())
        except BaseException:
            self._report.done = True
            raise

    def _checked(self, number: int, items: Any) -> Any:
        wanted = self._sizes[number]
        if wrong := what_is_wrong(items, wanted):
            rank = self._ranks[number]
            raise CallError(
                f"rank {rank} returned {wrong} for {wanted} items of the batch call {self._method}(): "
                "a batch method returns a list, an array or a tensor with one result per item",
                rank=rank, method=self._method, executed="yes",
            )  # fmt: skip
        return items

    def as_argument(self) -> list[T_co]:
        """This sequence, typed as the list of its results; for type checkers, as `Future.as_argument`."""
        return self  # type: ignore[return-value]

    def part(self, items: slice) -> PartOfSequence:
        """Some items, as an argument of another call. Does not wait."""
        return PartOfSequence(self._touched(items), list)

    def item(self, index: int) -> PartOfSequence:
        """A single item, as an argument of another call. Does not wait."""
        return PartOfSequence(self._touched(slice(index, index + 1)), operator.itemgetter(0))

    def _touched(self, items: slice) -> list[tuple[Future[Any], ItemRange]]:
        """The shards that a slice with step 1 touches, and the items of each in the slice."""
        start, stop, _ = items.indices(len(self))
        touched = []
        for shard, first, size in zip(self._shards, self._starts, self._sizes, strict=False):
            low, high = max(start, first), min(stop, first + size)
            if low < high:
                touched.append((shard, ItemRange(low - first, high - first, size)))
        return touched

    def __reduce__(self) -> tuple[Any, ...]:
        return PartOfSequence(self._touched(slice(None)), list).__reduce__()

    def result(self, timeout: float | None = None) -> list[T_co]:
        """All results; the first failure of any shard raises at once."""
        gather(self._shards).result(timeout)
        return list(self)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all results; the first failure of any shard raises at once."""
        self.result(timeout)

    def done(self) -> bool:
        return all(shard.done() for shard in self._shards)

    def cancel(self) -> bool:
        """Cancel the shards that are not done; True if any was."""
        cancelled = [shard.cancel() for shard in self._shards]
        return any(cancelled)

    def waiting_for(self) -> str:
        """The calls that the results come from, shard by shard. Empty once all are done."""
        return "; ".join(shard.waiting_for() for shard in self._shards if not shard.done())

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        yield from gather(self._shards).__await__()
        return list(self)

    async def __aiter__(self) -> AsyncIterator[T_co]:
        for number, shard in enumerate(self._shards):
            try:
                items = self._checked(number, await shard)
            except BaseException:
                self._report.done = True
                raise
            for item in items:
                yield item

    async def as_completed(self) -> AsyncIterator[tuple[int, T_co]]:
        """Pairs of index and item, in the order in which shards arrive."""
        import asyncio

        async def one(number: int) -> int:
            self._shards[number].mark_retrieved()  # The first error is raised.
            await self._shards[number]
            return number

        tasks = [asyncio.ensure_future(one(number)) for number in range(len(self._shards))]
        try:
            for finished in asyncio.as_completed(tasks):
                number = await finished
                for offset, item in enumerate(self._shard(number)):
                    yield self._starts[number] + offset, item
        finally:
            for task in tasks:
                task.cancel()

    def __repr__(self) -> str:
        ready = sum(size for size, shard in zip(self._sizes, self._shards, strict=True) if shard.done())
        return f"<FutureSequence of {len(self)} items, {ready} there>"
