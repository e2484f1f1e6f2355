"""The page that says what a member runs names the method that runs, not one that waits or has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rlmesh import rpc
from rlmesh.runtime.serving.activity_board import Board, look_at
from rlmesh.testing import InProcessCluster
from tests.own_time import HANG_S

Until = Callable[..., None]


class Worker:
    """Its methods wait, and then hold the thread on which they run until they are let go."""

    def __init__(self) -> None:
        self.holds, self.let_go = threading.Event(), threading.Event()
        self.waiting: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}

    def hold(self) -> None:
        self.holds.set()
        assert self.let_go.wait(HANG_S)

    async def wait(self, name: str) -> None:
        self.loop = asyncio.get_running_loop()
        gate = self.gates[name] = asyncio.Event()
        self.waiting.add(name)
        await gate.wait()

    def wake(self, name: str) -> None:
        """From another thread."""
        self.loop.call_soon_threadsafe(self.gates[name].set)

    @rpc
    async def serial(self) -> None:
        await self.wait("serial")
        self.hold()

    @rpc(concurrent=4)
    async def concurrent(self) -> None:
        await self.wait("concurrent")
        self.hold()

    @rpc
    async def nested(self) -> None:
        async def inner() -> None:
            await self.wait("nested")
            self.hold()

        await inner()

    @rpc
    async def caught(self) -> None:
        try:
            await asyncio.wait_for(self.wait("caught"), HANG_S)
        finally:
            self.hold()

    @rpc
    def hidden(self) -> Awaitable[None]:
        return self.nested_in("hidden")

    async def nested_in(self, name: str) -> None:
        await self.wait(name)
        self.hold()

    @rpc
    async def stream(self) -> AsyncIterator[int]:
        yield 1
        await self.wait("stream")
        self.hold()
        yield 2

    @rpc
    def steps(self) -> Iterator[int]:
        yield 1
        self.hold()
        yield 2

    @rpc
    async def task(self) -> None:
        made = asyncio.create_task(self.nested_in("task"))
        await asyncio.wait([made])

    @rpc
    async def waits(self) -> None:
        await self.wait("waits")

    @rpc
    async def ends(self) -> None:
        await asyncio.sleep(0)

    @rpc
    def def_waits(self) -> None:
        self.waiting.add("def_waits")
        assert self.let_go.wait(HANG_S)


class Member:
    """A `Worker` that is served, and its page."""

    def __init__(self, cluster: InProcessCluster, path: Path) -> None:
        self.worker, self._path = Worker(), path
        self.handle = cluster.serve("W", self.worker)[0]
        self._board = Board(path)
        cluster.runtimes[-1].note_methods_on(self._board)

    def close(self) -> None:
        self._board.words.release()
        self._board._page.close()

    def shown(self) -> str:
        seen = look_at(self._path)
        assert seen is not None
        return seen.method


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    with InProcessCluster() as cluster:
        made = Member(cluster, tmp_path / "doing")
        try:
            yield made
        finally:
            made.worker.let_go.set()
    made.close()


@pytest.mark.parametrize("other", ["waits", "ends", "def_waits"])
@pytest.mark.parametrize("name", ["serial", "concurrent", "nested", "caught"])
def test_what_goes_on_is_named_whatever_began_after_it(member: Member, until: Until, name: str, other: str) -> None:
    worker = member.worker
    first = member.handle.call(name)
    until(lambda: name in worker.waiting)
    second = member.handle.call(other)
    if other == "ends":
        second.result(HANG_S)
    until(lambda: other in worker.waiting or other == "ends")
    worker.wake(name)
    assert worker.holds.wait(HANG_S)
    assert member.shown() == f"W:0.{name}()"
    worker.let_go.set()
    first.result(HANG_S)
    if other == "waits":
        worker.wake("waits")
    second.result(HANG_S)
    until(lambda: member.shown() == "")


def test_a_method_that_is_cancelled_and_goes_on_is_named(member: Member, until: Until) -> None:
    worker = member.worker
    first = member.handle.call("caught")
    until(lambda: "caught" in worker.waiting)
    member.handle.call("ends").result(HANG_S)
    first.cancel()
    assert worker.holds.wait(HANG_S)
    assert member.shown() == "W:0.caught()"
    worker.let_go.set()
    until(lambda: member.shown() == "")


def test_a_coroutine_of_a_plain_method_is_named(member: Member, until: Until) -> None:
    worker = member.worker
    first = member.handle.call("hidden")
    until(lambda: "hidden" in worker.waiting)
    member.handle.call("ends").result(HANG_S)
    worker.wake("hidden")
    assert worker.holds.wait(HANG_S)
    assert member.shown() == "W:0.hidden()"
    worker.let_go.set()
    first.result(HANG_S)
    until(lambda: member.shown() == "")


@pytest.mark.parametrize("name", ["stream", "steps"])
def test_the_method_that_makes_an_item_is_named(member: Member, until: Until, name: str) -> None:
    worker = member.worker
    items = iter(member.handle.stream(name))
    assert next(items) == 1
    if name == "stream":
        until(lambda: name in worker.waiting)
        member.handle.call("ends").result(HANG_S)
        assert member.shown() == ""
        worker.wake(name)
    assert worker.holds.wait(HANG_S)
    assert member.shown() == f"W:0.{name}()"
    worker.let_go.set()
    assert list(items) == [2]
    until(lambda: member.shown() == "")


def test_no_method_is_named_for_a_task_of_its_own(member: Member, until: Until) -> None:
    worker = member.worker
    first, second = member.handle.call("task"), member.handle.call("waits")
    until(lambda: {"task", "waits"} <= worker.waiting)
    worker.wake("task")
    assert worker.holds.wait(HANG_S)
    assert member.shown() == ""
    worker.let_go.set()
    first.result(HANG_S)
    worker.wake("waits")
    second.result(HANG_S)
