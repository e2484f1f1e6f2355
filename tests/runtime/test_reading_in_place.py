"""Threads that wait for an answer read the connection in the loop's place, and nothing is lost or overtaken."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rlmesh.errors import PeerLost
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S

KEY = b"k" * 32
POLLS = NetworkOptions(busy_poll_s=0.02)
ROUNDS = 150


class Member:
    def __init__(self) -> None:
        self.seen: list[int] = []

    @rpc
    def quick(self, value: int) -> int:
        return value

    @rpc
    async def quick_async(self, value: int) -> int:
        return value

    @rpc
    def fails(self, value: int) -> None:
        raise KeyError(value)

    @rpc
    def note(self, value: int) -> None:
        self.seen.append(value)

    @rpc
    def noted(self) -> list[int]:
        return self.seen

    @rpc
    def large(self, size: int, value: int) -> np.ndarray:
        return np.full(size, value)

    @rpc(concurrent=4)
    async def count(self, until: int):  # type: ignore[no-untyped-def]
        for number in range(until):
            yield number


@contextmanager
def _member(tmp_path: Path) -> Iterator[tuple[Runtime, MemberHandle]]:
    """A caller with a loop on a thread of its own, and a member in the same process."""
    with Runtime.start(name="M:0", key=KEY, socket_dir=tmp_path) as served:
        served.serve("M:0", Member())
        assert served.endpoint is not None
        with Runtime.start(name="caller", key=KEY, bind=False, network=POLLS) as caller:
            yield caller, caller.peer("M:0", served.endpoint)


def _looked(runtime: Runtime) -> int:
    assert runtime._calls.busy_poll is not None
    return runtime._calls.busy_poll.turns


def test_a_plain_thread_reads_its_answers_itself(tmp_path: Path) -> None:
    with _member(tmp_path) as (caller, handle):
        for number in range(ROUNDS):
            assert handle.call("quick", number).result() == number
            with pytest.raises(Exception, match=str(number)):
                handle.call("fails", number).result()
        assert _looked(caller) > ROUNDS // 10


async def test_so_does_a_coroutine_of_another_loop(tmp_path: Path) -> None:
    with _member(tmp_path) as (caller, handle):
        for number in range(ROUNDS):
            assert await handle.call("quick_async", number) == number
        assert _looked(caller) > ROUNDS // 10


def test_what_is_no_lone_answer_stays_with_the_loop(tmp_path: Path) -> None:
    """Values in shared memory, items of streams, give-backs: all arrive, in order, while threads read."""
    with _member(tmp_path) as (caller, handle):
        for number in range(ROUNDS):
            assert handle.call("quick", number).result() == number
            array = handle.call("large", 100_000, number).result()
            assert array.shape == (100_000,)
            assert (array == number).all()
            del array
            if number % 10 == 0:
                assert list(handle.stream("count", 20)) == list(range(20))
        assert _looked(caller) > ROUNDS // 10


def test_many_threads_and_loops_at_once_get_their_own_answers(tmp_path: Path) -> None:
    with _member(tmp_path) as (_, handle):

        def plain(first: int) -> None:
            for number in range(first, first + ROUNDS):
                assert handle.call("quick", number).result() == number
                if number % 7 == 0:
                    assert handle.call("large", 50_000, number).result()[-1] == number

        async def on_a_loop(first: int) -> None:
            for number in range(first, first + ROUNDS):
                assert await handle.call("quick_async", number) == number

        with ThreadPoolExecutor(6) as pool:
            jobs = [pool.submit(plain, 1000 * k) for k in range(3)]
            jobs += [pool.submit(asyncio.run, on_a_loop(10_000 * (k + 1))) for k in range(3)]
            for job in jobs:
                job.result(60)


def test_calls_of_one_thread_keep_their_order(tmp_path: Path) -> None:
    with _member(tmp_path) as (_, handle):
        for number in range(ROUNDS):
            handle.notify("note", 2 * number)
            assert handle.call("quick", number).result() == number
            handle.notify("note", 2 * number + 1)
        assert handle.call("noted").result() == list(range(2 * ROUNDS))


def test_a_call_from_a_callback_of_an_answer(tmp_path: Path) -> None:
    """The thread that reads an answer runs its callbacks; it holds nothing then that another call needs."""
    with _member(tmp_path) as (_, handle):
        for number in range(ROUNDS):
            got: list[int] = []
            done = threading.Event()

            def note(answered: Future[int], got: list[int] = got, done: threading.Event = done) -> None:
                got.append(answered.result())
                done.set()

            def follow(_: object, number: int = number, note: Callable[[Future[int]], None] = note) -> None:
                handle.call("quick", -number).add_done_callback(note)

            future = handle.call("quick", number)
            future.add_done_callback(follow)
            assert future.result() == number
            assert done.wait(HANG_S)
            assert got == [-number]


def test_a_loop_that_was_stopped_while_it_waited(tmp_path: Path) -> None:
    """It leaves its call behind; others are polled for as ever."""
    with _member(tmp_path) as (caller, handle):
        for number in range(20):
            assert handle.call("quick", number).result() == number

        loop = asyncio.new_event_loop()
        waits = loop.create_task(_wait(handle))
        loop.call_soon(loop.stop)
        loop.run_forever()
        handle.call("quick", 0).result()
        handle.call("quick", 0).result()
        before = _looked(caller)
        for number in range(50):
            assert handle.call("quick", number).result() == number
        assert _looked(caller) > before
        loop.run_until_complete(waits)
        loop.close()


async def _wait(handle: MemberHandle) -> int:
    value: int = await handle.call("quick", 1)
    return value


MEMBER_SCRIPT = """
import sys
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

class Member:
    @rpc
    def quick(self, value):
        return value

with Runtime.start(name="M:0", key=b"k" * 32, socket_dir=sys.argv[1]) as runtime:
    runtime.serve("M:0", Member())
    print(runtime.endpoint, flush=True)
    sys.stdin.read()
"""


def test_a_member_that_is_killed_while_a_thread_reads(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    member = subprocess.Popen(
        [sys.executable, "-c", MEMBER_SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert member.stdout is not None
        endpoint = member.stdout.readline().strip()
        with Runtime.start(name="caller", key=KEY, bind=False, network=POLLS) as caller:
            handle = caller.peer("M:0", endpoint)
            answered = handle.call("quick", 1).result()  # connected: the kill meets calls, not the greeting

            def kill() -> None:
                os.kill(member.pid, signal.SIGKILL)

            timer = threading.Timer(0.2, kill)
            timer.start()
            with pytest.raises(PeerLost):
                while True:
                    assert handle.call("quick", answered).result() == answered
                    answered += 1
            timer.join()
            assert member.wait(HANG_S) == -signal.SIGKILL
    finally:
        member.kill()
        member.communicate()
