"""Methods that raise what steers the interpreter: the caller is told of it, not steered."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rlmesh.errors import GroupCallError, RemoteError
from rlmesh.runtime.rpc import rpc
from rlmesh.wire.remote_type import CONTROL_FLOW
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh

KINDS = {
    "StopIteration": StopIteration, "StopAsyncIteration": StopAsyncIteration, "GeneratorExit": GeneratorExit,
    "asyncio.exceptions.CancelledError": asyncio.CancelledError, "KeyboardInterrupt": KeyboardInterrupt,
    "concurrent.futures._base.CancelledError": concurrent.futures.CancelledError,
}  # fmt: skip


class Data:
    def __init__(self) -> None:
        self.items = iter([1, 2])

    @rpc
    def next_batch(self) -> int:
        return next(self.items)

    @rpc
    def fails(self, kind: str) -> None:
        raise KINDS[kind]("over")

    @rpc
    async def fails_async(self, kind: str) -> None:
        raise KINDS[kind]("over")

    @rpc
    def score(self, items: list[int]) -> list[int]:
        if 2 in items:
            raise StopIteration("in a batch")
        return items

    @rpc
    def looks_up(self, items: list[int]) -> list[int]:
        raise IndexError("no such shard")

    @rpc
    def items_of(self) -> Iterator[int]:
        return Broken()

    @rpc
    async def items_async(self) -> AsyncIterator[int]:
        yield 1
        raise asyncio.CancelledError("over")


class Broken(Iterator[int]):
    """Gives an item, then raises what ends another kind of loop."""

    given = False

    def __next__(self) -> int:
        if self.given:
            raise StopAsyncIteration("over")
        self.given = True
        return 1


@pytest.mark.case("b01")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fails", "fails_async"])
def test_a_call_raises_a_remote_error(mesh: Mesh, method: str, kind: str) -> None:
    if method == "fails_async" and kind == "StopIteration":
        kind = "StopAsyncIteration"  # Python itself turns a StopIteration in a coroutine into a RuntimeError.
    group = mesh.serve("DATA", Data(), Data())
    for future in (group[0].call(method, kind), group.call(method, kind)):
        error = future.exception(HANG_S)
        assert isinstance(error, RemoteError) and not isinstance(error, CONTROL_FLOW)
        assert error.remote_type == kind and error.remote_message == "over"
    outcomes = group.options(return_exceptions=True).call(method, kind).result(HANG_S)
    with pytest.raises(GroupCallError) as caught:
        outcomes.raise_all()
    assert all(isinstance(error, RemoteError) for error in caught.value.exceptions)

    async def awaited() -> Any:
        with pytest.raises(RemoteError):
            await group[0].call(method, kind)
        results = await asyncio.gather(group[0].call(method, kind), group.call(method, kind), return_exceptions=True)
        assert all(isinstance(result, RemoteError) for result in results)
        with pytest.raises(ExceptionGroup) as together:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(wait_for(group[0].call(method, kind)))
        assert all(isinstance(error, RemoteError) for error in together.value.exceptions)

    asyncio.run(awaited())


async def wait_for(future: Any) -> Any:
    return await future


@pytest.mark.case("b01")
def test_no_result_is_lost_where_results_are_iterated(mesh: Mesh) -> None:
    data = mesh.serve("DATA", Data(), Data())
    futures = [data[0].call("next_batch") for _ in range(4)]
    with pytest.raises(RemoteError, match="StopIteration"):
        list(map(lambda future: future.result(HANG_S), futures))  # noqa: C417
    results = data.call_batch("score", 4, [0, 1, 2, 3])
    with pytest.raises(RemoteError, match="in a batch"):
        list(results)
    with pytest.raises(RemoteError, match="in a batch"):
        list(map(results.__getitem__, range(4)))

    async def items() -> list[int]:
        return [item async for item in data.call_batch("score", 4, [0, 1, 2, 3])]

    with pytest.raises(RemoteError, match="in a batch"):
        asyncio.run(items())
    with pytest.raises(RemoteError, match="no such shard"):
        data.call_batch("looks_up", 2, [1, 2]).index(1)


@pytest.mark.case("b01")
@pytest.mark.parametrize("method", ["items_of", "items_async"])
def test_a_stream_that_breaks_off_does_not_look_ended(mesh: Mesh, method: str) -> None:
    data = mesh.serve("DATA", Data())
    taken = []
    with pytest.raises(RemoteError, match="over"):
        for item in data[0].stream(method):
            taken.append(item)  # noqa: PERF402
    assert taken == [1]

    async def items() -> None:
        async for item in data[0].stream(method):
            taken.append(item)  # noqa: PERF401

    with pytest.raises(RemoteError, match="over"):
        asyncio.run(items())
    assert taken == [1, 1]
