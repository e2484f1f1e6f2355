"""Calls to one member and to groups: results, errors, order, deadlines, cancellation, deadlock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.errors import CallCancelled, CallTimeout, MethodNotFound, RoleNotFound, UsageError, WouldDeadlock
from rlmesh.runtime.calling.gathering import GroupOutcomes
from rlmesh.runtime.connections.address_book import MemberAddress
from rlmesh.runtime.default_runtime import set_default_runtime
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY, Mesh


class Member:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.seen: list[Any] = []
        self.release = threading.Event()
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.group: RoleGroup[Any] | None = None

    @rpc
    def echo(self, value: Any) -> Any:
        return value

    @rpc
    async def echo_async(self, value: Any) -> Any:
        return value

    @rpc
    def rank_of(self) -> int:
        return self.rank

    @rpc
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @rpc
    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError(f"r{rank}")
        self.release.wait(20)
        return self.rank

    @rpc
    def wait(self) -> str:
        self.started.set()
        self.release.wait(20)
        return "released"

    @rpc
    async def sleep(self, seconds: float) -> None:
        self.started.set()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @rpc
    def call_back(self, name: str) -> Any:
        assert self.group is not None
        return self.group[0].call(name, 7).result()

    @rpc
    def nested_timeout(self) -> str:
        assert self.group is not None
        try:
            self.group[0].call("sleep", 20).result()
        except CallTimeout:
            return "nested call timed out"
        return "it answered"

    @rpc
    async def leave_a_task(self, delay_s: float) -> None:
        async def later() -> Any:
            assert self.group is not None
            await asyncio.sleep(delay_s)
            return await self.group[0].call("echo", "later")

        self.task = asyncio.get_running_loop().create_task(later())

    @rpc
    async def result_of_the_task(self) -> Any:
        return await self.task

    def hidden(self) -> None: ...


@pytest.mark.parametrize("method", ["echo", "echo_async"])
@pytest.mark.parametrize(
    "value",
    [1, "text", [1, {"a": None}], np.arange(5), torch.arange(100_000)],
    ids=["int", "str", "nested", "np", "torch"],
)
def test_a_value_comes_back(mesh: Mesh, method: str, value: Any) -> None:
    back = mesh.serve("A", Member())[0].call(method, value).result()
    assert np.array_equal(back, value) if isinstance(value, np.ndarray | torch.Tensor) else back == value


def test_group_calls_give_results_by_rank(mesh: Mesh) -> None:
    group = mesh.serve("A", *[Member(rank) for rank in range(3)])
    assert len(group) == 3
    assert group.call(Member.rank_of).result() == [0, 1, 2]
    assert group.call_rank0("rank_of").result() == 0
    assert group[2].call("rank_of").result() == group[-1].call("rank_of").result() == 2
    assert group[1:].call("rank_of").result() == [1, 2]
    assert group.call("echo", [10, 20, 30], _scatter=True).result() == [10, 20, 30]


def test_the_first_failure_of_a_group_raises_at_once_as_itself(mesh: Mesh, own_time: OwnTime) -> None:
    members = [Member(rank) for rank in range(3)]
    group = mesh.serve("A", *members)
    started = time.monotonic()
    with pytest.raises(ValueError, match="r2") as caught:
        group.call("fail_on", 2).result()
    assert own_time.since(started) < 2
    assert caught.value.rank == 2  # type: ignore[attr-defined]
    for member in members:
        member.release.set()
    outcomes = group.options(return_exceptions=True).call("fail_on", 2).result()
    assert outcomes[:2] == [0, 1] and isinstance(outcomes[2], ValueError)
    with pytest.raises(ExceptionGroup):
        GroupOutcomes(outcomes).raise_all()


def test_calls_of_one_caller_start_in_order(mesh: Mesh) -> None:
    member = Member()
    handle = mesh.serve("A", member)[0]
    for number in range(500):
        handle.notify("note", number)
    handle.call("echo", None).result()
    assert member.seen == list(range(500))


def test_arguments_are_captured_when_call_returns(mesh: Mesh) -> None:
    handle = mesh.serve("A", Member())[0]
    array, items = np.zeros(50_000), [1, 2]
    future = handle.call("echo", (array, items))
    array[:] = 9
    items.append(3)
    back, back_items = future.result()
    assert back.sum() == 0 and back_items == [1, 2]


def test_calls_wait_for_a_member_that_is_not_up_yet(mesh: Mesh) -> None:
    mesh.publish(MemberAddress("LATE", 0, 0, None))
    future = RoleGroup("LATE", runtime=mesh.caller)[0].call("echo", 5)
    runtime = mesh.start("LATE:0")
    runtime.serve("LATE:0", Member())
    assert not future.done() and "LATE:0.echo()" in future.waiting_for()
    mesh.addresses[:] = []
    mesh.publish(MemberAddress("LATE", 0, 0, runtime.endpoint), MemberAddress("X", 0, 0, None))
    assert future.result(HANG_S) == 5


def test_wrong_use_says_what_is_right(mesh: Mesh) -> None:
    group = mesh.serve("ACTOR", Member())
    with pytest.raises(MethodNotFound, match=r"exports no method 'eco'.*did you mean echo"):
        group[0].call("eco", 1).result()
    with pytest.raises(MethodNotFound, match="hidden"):
        group[0].call("hidden").result()
    with pytest.raises(RoleNotFound, match="did you mean ACTOR"):
        RoleGroup("ACTR", runtime=mesh.caller).call("echo", 1)
    with pytest.raises(RoleNotFound, match="no member 5"):
        group[5]
    with pytest.raises(UsageError, match="seconds above 0"):
        group.options(timeout_s=0)
    set_default_runtime(None)
    with pytest.raises(UsageError, match="not part of a job"):
        RoleGroup("ACTOR").call("echo", 1)


def test_a_call_fails_at_its_deadline(mesh: Mesh, own_time: OwnTime) -> None:
    member = Member()
    group = mesh.serve("A", member)
    started = time.monotonic()
    with pytest.raises(CallTimeout, match=r"A:0\.sleep\(\) gave no answer within its deadline") as caught:
        group.options(timeout_s=0.3)[0].call("sleep", 20).result()
    assert time.monotonic() - started > 0.25 and own_time.since(started) < 2
    assert caught.value.executed == "maybe"
    assert member.cancelled.wait(HANG_S), "the coroutine went on after its caller gave up"


def test_nested_calls_inherit_the_deadline(mesh: Mesh, own_time: OwnTime) -> None:
    inner, outer = Member(), Member()
    outer.group = mesh.serve("INNER", inner)
    outer.group = RoleGroup("INNER", runtime=mesh.runtimes[-1])
    group = mesh.serve("OUTER", outer)
    outer.group = RoleGroup("INNER", runtime=mesh.runtimes[-1])
    started = time.monotonic()
    future = group.options(timeout_s=0.4)[0].call("nested_timeout")
    try:
        # Both deadlines pass at the same moment: the outer call may just hear of the inner one's end.
        assert future.result() == "nested call timed out"
    except CallTimeout:
        pass
    assert inner.cancelled.wait(HANG_S), "the nested call outlived its deadline"
    assert own_time.since(started) < 3


def test_what_a_method_leaves_behind_outlives_its_deadline(mesh: Mesh) -> None:
    inner, outer = Member(), Member()
    mesh.serve("INNER", inner)
    group = mesh.serve("OUTER", outer)
    outer.group = RoleGroup("INNER", runtime=mesh.runtimes[-1])
    assert group[0].call("echo", 3).result() == 3  # connects, which is no part of the deadline's work
    group.options(timeout_s=0.5)[0].call("leave_a_task", 0.8).result()
    assert group[0].call("result_of_the_task").result(HANG_S) == "later"


def test_cancelling_reaches_queued_and_running_calls(mesh: Mesh, until: Callable[..., None]) -> None:
    member = Member()
    handle = mesh.serve("A", member)[0]
    running = handle.call("wait")
    assert member.started.wait(HANG_S)
    queued = handle.call("note", "must not run")
    assert queued.cancel()
    member.started.clear()
    coroutine = handle.call("sleep", 20)
    assert member.started.wait(HANG_S)
    coroutine.cancel()
    assert member.cancelled.wait(HANG_S)
    with pytest.raises(CallCancelled):
        coroutine.result()
    # The cancellation of the queued call must be there before the slot becomes free.
    until(lambda: len(mesh.runtimes[-1].activity.serving()) == 1)
    member.release.set()
    assert running.result() == "released"
    handle.call("echo", None).result()
    assert member.seen == []
    assert mesh.caller.activity.pending() == []


@pytest.mark.parametrize("method", ["sleep", "echo_async"])
def test_a_call_that_is_cancelled_before_it_starts_gives_its_place_back(
    mesh: Mesh, until: Callable[..., None], method: str
) -> None:
    handle = mesh.serve("A", Member())[0]

    async def service() -> None:
        async with Runtime.open(name="service", key=KEY, bind=False, network=mesh.network) as runtime:
            own = runtime.peer("A:0", mesh.addresses[0].endpoint or "")
            assert await own.call("echo", 3) == 3
            # Calls and cancellations of one turn arrive together.
            for future in [own.call(method, 1) for _ in range(50)]:
                future.cancel()

    asyncio.run(service())
    assert handle.call("sleep", 0).result(HANG_S) is None and handle.call("echo_async", 1).result(HANG_S) == 1
    until(lambda: not mesh.runtimes[-1]._dispatcher._incoming)


def test_a_call_that_would_wait_for_itself_is_refused(mesh: Mesh) -> None:
    member = Member()
    group = mesh.serve("A", member)
    member.group = RoleGroup("A", runtime=mesh.runtimes[-1])
    with pytest.raises(WouldDeadlock, match="called on behalf of a method"):
        group[0].call("call_back", "echo").result(HANG_S)
    assert group[0].call("call_back", "echo_async").result(HANG_S) == 7


def test_waiting_on_the_loop_that_must_receive_the_answer_is_refused(mesh: Mesh) -> None:
    member = Member()
    mesh.serve("A", member)

    async def service() -> None:
        async with Runtime.open(name="service", key=KEY, bind=False, network=mesh.network) as runtime:
            handle = runtime.peer("A:0", mesh.addresses[0].endpoint or "")
            assert await handle.call("echo", 3) == 3
            with pytest.raises(WouldDeadlock, match="await future"):
                handle.call("wait").result()

    before = {thread.name for thread in threading.enumerate()}
    asyncio.run(service())
    member.release.set()
    started = {thread.name for thread in threading.enumerate()} - before
    assert started <= {"rlmesh-calls-A:0"}, "the service's side started a thread"


def test_awaiting_from_another_loop_works_and_cancels(mesh: Mesh) -> None:
    member = Member()
    handle = mesh.serve("A", member)[0]

    async def main() -> None:
        assert await asyncio.gather(*[handle.call("echo", i) for i in range(20)]) == list(range(20))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.call("sleep", 20), 0.2)

    asyncio.run(main())
    assert member.cancelled.wait(HANG_S)


def test_a_pending_future_says_whom_it_waits_for(mesh: Mesh) -> None:
    member = Member()
    group = mesh.serve("A", member)
    future = group.call("wait")
    assert member.started.wait(HANG_S)
    assert "A:0.wait() for " in future.waiting_for() and "1 of 1" in future.waiting_for()
    assert [line.partition(" for ")[0] for line in mesh.caller.activity.pending()] == ["A:0.wait()"]
    with pytest.raises(TimeoutError, match=r"still waiting for .*A:0\.wait\(\)"):
        future.result(0.05)
    member.release.set()
    assert future.result() == ["released"] and future.waiting_for() == ""


def test_thousands_of_calls_at_once_are_all_answered(mesh: Mesh) -> None:
    handle = mesh.serve("A", Member())[0]
    futures = [handle.call("echo", number) for number in range(5000)]
    assert [future.result(60) for future in futures] == list(range(5000))
    assert mesh.caller.activity.pending() == []


_seen: ContextVar[int] = ContextVar("seen", default=0)


class Serial:
    """Coroutines of one method that run one after the other."""

    def __init__(self) -> None:
        self.order: list[int] = []

    @rpc
    async def visit(self, number: int, pause_s: float = 0.0) -> tuple[int, bool]:
        before = _seen.get()
        _seen.set(number)
        self.order.append(number)
        if pause_s:
            async with asyncio.timeout(pause_s + 5):
                await asyncio.sleep(pause_s)
        if number == 3:
            raise ValueError("three")
        return before, _seen.get() == number


def test_queued_coroutines_share_neither_context_nor_errors(mesh: Mesh) -> None:
    serial = Serial()
    handle = mesh.serve("S", serial)[0]
    futures = [handle.call(Serial.visit, number, 0.001 if number % 2 else 0.0) for number in range(1, 200)]
    for number, future in enumerate(futures, 1):
        if number == 3:
            with pytest.raises(ValueError, match="three"):
                future.result()
        else:
            assert future.result() == (0, True)
    assert serial.order == list(range(1, 200))


def test_cancelling_one_of_the_queued_coroutines_ends_that_one(mesh: Mesh, until: Callable[..., None]) -> None:
    serial = Serial()
    handle = mesh.serve("S", serial)[0]
    long = handle.call(Serial.visit, 1, 30.0)
    second, third, fourth = (handle.call(Serial.visit, number, 0.01) for number in (2, 4, 5))
    until(lambda: serial.order == [1])
    assert third.cancel()
    assert long.cancel()
    assert second.result(HANG_S) == (0, True)
    assert fourth.result(HANG_S) == (0, True)
    assert serial.order == [1, 2, 5]
