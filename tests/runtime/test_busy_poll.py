"""A loop polls for a quick answer, and only for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmesh.errors import MethodNotFound
from rlmesh.runtime.calling.busy_poll import wait_about
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.own_time import OwnTime

KEY = b"k" * 32


class Member:
    @rpc
    def quick(self, value: int) -> int:
        return value

    @rpc(concurrent=10)
    async def slow(self) -> None:
        await asyncio.sleep(0.05)


async def _turns(tmp_path: Path, options: NetworkOptions) -> tuple[int, int, int]:
    """How often the loop looked during quick calls, slow ones, and quick ones that are on their way together."""
    with Runtime.start(name="M:0", key=KEY, socket_dir=tmp_path) as served:
        served.serve("M:0", Member())
        assert served.endpoint is not None
        async with Runtime.open(key=KEY, bind=False, network=options) as runtime:
            handle = runtime.peer("M:0", served.endpoint)
            poll = runtime._calls.busy_poll

            def looked() -> int:
                return poll.turns if poll is not None else 0

            counts = []
            for number in range(200):
                assert await handle.call(Member.quick, number) == number
            counts.append(looked())
            await handle.call(Member.slow)
            before = looked()
            for _ in range(3):
                await handle.call(Member.slow)
            counts.append(looked() - before)
            await handle.call(Member.quick, 0)
            before = looked()
            for _ in range(20):
                await asyncio.gather(*(handle.call(Member.quick, number) for number in range(5)))
            counts.append(looked() - before)
            return counts[0], counts[1], counts[2]


async def test_a_loop_looks_for_quick_answers_only(tmp_path: Path) -> None:
    quick, slow, together = await _turns(tmp_path, NetworkOptions(busy_poll_s=0.02))
    assert quick > 200
    assert slow == 0
    assert together == 0


async def test_looking_can_be_turned_off(tmp_path: Path) -> None:
    assert await _turns(tmp_path, NetworkOptions(busy_poll_s=0)) == (0, 0, 0)


class Master:
    def __init__(self) -> None:
        self.changes = asyncio.Event()

    @rpc(concurrent=10)
    async def follow(self) -> None:
        await self.changes.wait()

    @rpc
    async def change(self) -> None:
        self.changes.set()


async def test_a_question_that_waits_at_the_master_does_not_count(tmp_path: Path) -> None:
    with Runtime.start(name="M:0", key=KEY, socket_dir=tmp_path) as served:
        served.serve("M:0", Member())
        with Runtime.start(name="@master", key=KEY, socket_dir=tmp_path) as other:
            other.serve("@master", Master())
            other.serve("W:0", Master())
            assert served.endpoint is not None and other.endpoint is not None
            options = NetworkOptions(busy_poll_s=0.02)
            async with Runtime.open(key=KEY, bind=False, network=options) as runtime:
                handle, master = runtime.peer("M:0", served.endpoint), runtime.peer("@master", other.endpoint)
                poll = runtime._calls.busy_poll
                assert poll is not None
                await handle.call(Member.quick, 0)
                follows = [asyncio.ensure_future(master.call(Master.follow)) for _ in range(2)]
                await asyncio.sleep(0.05)
                before = poll.turns
                for number in range(200):
                    assert await handle.call(Member.quick, number) == number
                assert poll.turns - before > 200
                assert not any(follow.done() for follow in follows)
                # A member's call that waits beside it does count.
                member = runtime.peer("W:0", other.endpoint)
                follows.append(asyncio.ensure_future(member.call(Master.follow)))
                await asyncio.sleep(0.01)
                before = poll.turns
                assert await handle.call(Member.quick, 1) == 1
                assert poll.turns == before
                await master.call(Master.change)
                await member.call(Master.change)
                await asyncio.gather(*follows)


def test_a_thread_looks_for_its_answer_beside_such_a_question(tmp_path: Path) -> None:
    with Runtime.start(name="M:0", key=KEY, socket_dir=tmp_path) as served:
        served.serve("M:0", Member())
        with Runtime.start(name="@other", key=KEY, socket_dir=tmp_path) as other:
            other.serve("@master", Master())
            assert served.endpoint is not None and other.endpoint is not None
            options = NetworkOptions(busy_poll_s=0.02)
            with Runtime.start(name="caller", key=KEY, bind=False, network=options) as caller:
                poll, master = caller._calls.busy_poll, caller.peer("@master", other.endpoint)
                assert poll is not None
                follow, handle = master.call(Master.follow), caller.peer("M:0", served.endpoint)
                for number in range(200):
                    assert handle.call(Member.quick, number).result() == number
                assert poll.turns > 10 and not follow.done()
                master.call(Master.change).result()
                follow.result()


class Regular:
    @rpc(concurrent=2)
    def takes(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


@contextmanager
def _regular(tmp_path: Path, options: NetworkOptions) -> Iterator[tuple[Runtime, MemberHandle[Regular]]]:
    with Runtime.start(name="M:0", key=KEY, socket_dir=tmp_path) as served:
        served.serve("M:0", Regular())
        assert served.endpoint is not None
        with Runtime.start(name="caller", key=KEY, bind=False, network=options) as caller:
            yield caller, caller.peer("M:0", served.endpoint)


def test_a_thread_that_knows_when_an_answer_is_due_looks_for_it_then(tmp_path: Path) -> None:
    with _regular(tmp_path, NetworkOptions(busy_poll_s=0.05)) as (caller, handle):
        poll = caller._calls.busy_poll
        assert poll is not None
        assert handle.call(Regular.takes, 0.2).result() == 0.2
        assert poll.turns == 0
        began = time.process_time()
        for _ in range(10):
            answer = handle.call(Regular.takes, 0.2)
            began = time.process_time()
            wait_about(answer, 0.2)
            assert answer.done() and answer.result() == 0.2
            if poll.turns:
                break
        assert poll.turns > 0
        # It slept before: this process was busy for the last part only.
        assert time.process_time() - began < 0.15


def test_an_answer_that_is_not_there_when_it_is_due_is_waited_for(tmp_path: Path, own_time: OwnTime) -> None:
    with _regular(tmp_path, NetworkOptions(busy_poll_s=0.01)) as (caller, handle):
        poll = caller._calls.busy_poll
        assert poll is not None
        for due_s in (0.0, 0.03, 5.0):  # it comes later; or earlier, while this thread sleeps
            before = poll.turns
            answer = handle.call(Regular.takes, 0.3)
            began = time.monotonic()
            wait_about(answer, due_s)
            assert answer.done() and answer.result() == 0.3
            assert own_time.since(began) < 2
            assert due_s < 1 or poll.turns == before


def test_one_that_failed_before_it_was_due_is_not_waited_for(tmp_path: Path, own_time: OwnTime) -> None:
    with _regular(tmp_path, NetworkOptions(busy_poll_s=0.01)) as (_, handle):
        answer = handle.call("no_such_method")
        began = time.monotonic()
        wait_about(answer, 30.0)
        assert own_time.since(began) < 2
        assert isinstance(answer.exception(), MethodNotFound)


def test_nobody_looks_for_it_where_that_is_turned_off(tmp_path: Path) -> None:
    with _regular(tmp_path, NetworkOptions(busy_poll_s=0)) as (caller, handle):
        answer = handle.call(Regular.takes, 0.05)
        wait_about(answer, 0.05)
        assert answer.done() and caller._calls.busy_poll is None
