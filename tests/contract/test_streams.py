"""Streams: items of remote generators, back-pressure, and every way in which a stream may end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import CallCancelled, CallTimeout, PeerLost, UsageError, WouldDeadlock
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY, Mesh


class Member:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.made = 0
        self.closed = threading.Event()
        self.release = threading.Event()

    @rpc
    def count(self, n: int) -> Iterator[int]:
        try:
            for number in range(n):
                self.made += 1
                yield number
        finally:
            self.closed.set()

    @rpc
    async def count_async(self, n: int) -> AsyncIterator[int]:
        try:
            for number in range(n):
                await asyncio.sleep(0)
                self.made += 1
                yield number
        finally:
            self.closed.set()

    @rpc(concurrent=2)
    def count_pooled(self, n: int) -> Iterator[int]:
        yield from range(n)

    @rpc
    def fail_at(self, n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError(f"no item {n}")

    @rpc
    async def wait_after(self, n: int) -> AsyncIterator[int]:
        try:
            for number in range(n):
                yield number
            await asyncio.sleep(1000)
        finally:
            self.closed.set()

    @rpc
    def ranks(self, n: int) -> Iterator[tuple[int, int]]:
        for number in range(n):
            yield self.rank, number

    @rpc
    def arrays(self, n: int) -> Iterator[Any]:
        for number in range(n):
            yield np.full(10_000, number)

    @rpc
    def ready_made(self, n: int) -> Any:
        return iter(range(n))

    @rpc
    def plain(self) -> int:
        return 7

    @rpc
    async def plain_async(self) -> int:
        return 7

    @rpc
    def unsendable(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()


GENERATORS = ["count", "count_async", "count_pooled", "ready_made"]


@pytest.mark.parametrize("method", GENERATORS)
@pytest.mark.parametrize("n", [0, 1, 16, 100])
def test_all_items_come_in_order(mesh: Mesh, method: str, n: int) -> None:
    handle = mesh.serve("A", Member())[0]
    assert list(handle.stream(method, n)) == list(range(n))
    assert list(handle.options(window=1).stream(method, n)) == list(range(n))
    assert mesh.caller.activity.pending() == []


@pytest.mark.parametrize("method", GENERATORS)
def test_a_stream_is_iterated_by_async_for(mesh: Mesh, method: str) -> None:
    handle = mesh.serve("A", Member())[0]

    async def main() -> list[int]:
        return [item async for item in handle.stream(method, 50)]

    assert asyncio.run(main()) == list(range(50))


def test_a_stream_on_the_runtimes_own_loop_is_iterated_by_async_for_only(mesh: Mesh) -> None:
    mesh.serve("A", Member())

    async def service() -> None:
        async with Runtime.open(name="service", key=KEY, bind=False, network=mesh.network) as runtime:
            handle = runtime.peer("A:0", mesh.addresses[0].endpoint or "")
            assert [item async for item in handle.stream("count", 40)] == list(range(40))
            with pytest.raises(WouldDeadlock, match="would block the loop"):
                next(handle.stream("count", 1))

    asyncio.run(service())


@pytest.mark.parametrize("method", ["count", "count_async"])
def test_a_slow_consumer_holds_the_generator_back(mesh: Mesh, until: Callable[..., None], method: str) -> None:
    member = Member()
    handle = mesh.serve("A", member)[0]
    stream = handle.options(window=8).stream(method, 1000)
    until(lambda: member.made == 8)
    # It waits without holding the member: calls of other methods are answered.
    assert handle.call("plain").result() == handle.call("plain_async").result() == 7
    assert member.made == 8
    assert [next(stream) for _ in range(4)] == [0, 1, 2, 3]
    until(lambda: member.made == 12)
    assert list(stream) == list(range(4, 1000))


@pytest.mark.parametrize("method", ["count", "count_async"])
def test_leaving_early_ends_the_generator(mesh: Mesh, until: Callable[..., None], method: str) -> None:
    member = Member()
    handle: Any = mesh.serve("A", member)[0]
    for item in handle.stream(method, 1_000_000):
        if item == 20:
            break
    gc.collect()  # Only for interpreters that do not count references.
    assert member.closed.wait(HANG_S)
    until(lambda: mesh.caller.activity.pending() == [])
    assert member.made < 100

    member.closed.clear()
    with handle.stream(method, 1_000_000) as stream:
        assert next(stream) == 0
    assert member.closed.wait(HANG_S)
    with pytest.raises(StopIteration):
        next(stream)

    async def main() -> None:
        async for item in handle.stream(method, 1_000_000):
            if item == 20:
                break

    member.closed.clear()
    asyncio.run(main())
    assert member.closed.wait(HANG_S)
    assert handle.call("plain").result() == 7


def test_an_error_in_the_middle_comes_after_the_items_before_it(mesh: Mesh) -> None:
    stream = mesh.serve("A", Member())[0].stream("fail_at", 5)
    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no item 5") as caught:
        next(stream)
    assert caught.value.executed == "yes" and caught.value.rank == 0  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(stream)


def test_an_item_that_cannot_be_sent_is_an_error(mesh: Mesh) -> None:
    stream = mesh.serve("A", Member())[0].stream("unsendable")
    assert next(stream) == 1
    with pytest.raises(TypeError, match="lock"):
        next(stream)


def test_the_deadline_is_that_of_the_whole_stream(mesh: Mesh, own_time: OwnTime) -> None:
    member = Member()
    stream = mesh.serve("A", member)[0].options(timeout_s=0.4).stream("wait_after", 3)
    started = time.monotonic()
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(CallTimeout, match=r"A:0\.wait_after\(\)") as caught:
        next(stream)
    assert time.monotonic() - started > 0.3 and own_time.since(started) < 3
    assert caught.value.executed == "yes", "it sent items, so it ran"
    assert member.closed.wait(HANG_S)


def test_the_death_of_a_member_ends_the_stream(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmesh.runtime.calling.peer_connections.LOSS_GRACE_S", 0.1)
    stream = mesh.serve("A", Member())[0].stream("wait_after", 2)
    assert next(stream) == 0
    mesh.runtimes[-1].close()
    with pytest.raises((PeerLost, CallCancelled)) as caught:
        list(stream)
    assert caught.value.executed == "yes"


def test_the_end_of_the_consumer_ends_the_generator(mesh: Mesh) -> None:
    member = Member()
    mesh.serve("A", member)
    consumer = Runtime.start(name="consumer", key=KEY, bind=False, network=mesh.network)
    stream = consumer.peer("A:0", mesh.addresses[0].endpoint or "").stream("wait_after", 2)
    assert next(stream) == 0
    consumer.close()
    assert member.closed.wait(HANG_S)


def test_a_group_streams_what_comes_first_and_keeps_each_members_order(mesh: Mesh) -> None:
    group = mesh.serve("A", *[Member(rank) for rank in range(3)])
    items = list(group.stream("ranks", 30))
    assert sorted(items) == [(rank, number) for rank in range(3) for number in range(30)]
    for rank in range(3):
        assert [number for who, number in items if who == rank] == list(range(30))
    failing = group.stream("fail_at", 2)
    with pytest.raises(ValueError, match="no item 2"):
        list(failing)


def test_large_items_arrive_in_order(mesh: Mesh) -> None:
    arrays = list(mesh.serve("A", Member())[0].stream("arrays", 20))
    assert [array[0] for array in arrays] == list(range(20)) and all(len(array) == 10_000 for array in arrays)


def test_wrong_use_says_what_is_right(mesh: Mesh) -> None:
    handle = mesh.serve("A", Member())[0]
    for method in ("plain", "plain_async"):
        with pytest.raises(UsageError, match=r"it gives a int, not items: use call\(\)"):
            list(handle.stream(method))
    for method in ("count", "count_async"):
        with pytest.raises(UsageError, match=r"is a generator: take its items with stream\(\)"):
            handle.call(method, 3).result()
    with pytest.raises(UsageError, match="window=0"):
        handle.options(window=0)
    assert handle.call("plain").result() == 7


def test_a_waiting_stream_says_whom_it_waits_for(mesh: Mesh) -> None:
    stream = mesh.serve("A", Member())[0].stream("wait_after", 1)
    assert next(stream) == 0
    assert "A:0.wait_after() for " in stream.waiting_for() and "A:0.wait_after()" in repr(stream)
    stream.close()
    assert stream.waiting_for() == ""
