"""Blocks of ``device_lease()``: who wakes, who puts to sleep, and that nothing is kept by who gives up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, LeaseTimeout, UsageError
from rlmesh.job.device_lease import DeviceLease, SharedLease
from rlmesh.placement.device_leases import LeaseAnswer
from tests.own_time import HANG_S


class Agent:
    """Grants when told to; counts what is asked and given back."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.asked: list[Future[Any]] = []
        self.returned = 0

    def lease_devices(self, timeout_s: float) -> Future[Any]:
        self.asked.append(Future())
        if self.at_once:
            self.grant()
        return self.asked[-1]

    def grant(self, granted: bool = True) -> None:
        self.asked[-1].set_result(LeaseAnswer(granted, ("GPU-a",), 0.5, "B:0 has had GPU-a for 9.0 s"))

    def return_devices(self) -> Future[Any]:
        self.returned += 1
        done: Future[Any] = Future()
        done.set_result(None)
        return done


class Member:
    def __init__(self, *, at_once: bool = True) -> None:
        self.agent = Agent(at_once=at_once)
        self.shared = SharedLease("A:0", self.agent)
        self.did: list[str] = []

    def lease(self, wake: Any = None, sleep: Any = None) -> DeviceLease:
        return DeviceLease(self.shared, 3.0, wake or (lambda: self.did.append("wake")),
                           sleep or (lambda: self.did.append("sleep")))  # fmt: skip

    @property
    def balance(self) -> int:
        return len(self.agent.asked) - self.agent.returned


def test_a_block_wakes_works_and_puts_to_sleep() -> None:
    member = Member()
    with member.lease() as lease:
        assert (lease.devices, lease.waited_s) == (("GPU-a",), 0.5)
        with member.lease():
            member.did.append("work")
        assert member.balance == 1
    assert member.did == ["wake", "work", "sleep"]
    assert member.balance == 0
    with member.lease():
        pass
    assert len(member.agent.asked) == 2


def test_a_block_that_raises_puts_to_sleep_all_the_same() -> None:
    member = Member()
    with pytest.raises(ValueError, match="work"), member.lease():
        raise ValueError("work")
    assert member.did == ["wake", "sleep"]
    assert member.balance == 0


def fails() -> None:
    raise MemoryError("it does not fit")


def test_what_cannot_be_woken_is_put_to_sleep_and_given_back() -> None:
    member = Member()
    with pytest.raises(MemoryError), member.lease(wake=fails):
        raise AssertionError
    assert member.did == ["sleep"]
    assert member.balance == 0


def test_what_cannot_be_put_to_sleep_keeps_its_devices() -> None:
    member = Member()
    with pytest.raises(MemoryError), member.lease(sleep=fails):
        pass
    assert member.balance == 1
    with member.lease():  # the agent knows that the member has them, and says so again
        pass
    assert member.agent.returned == 1


def test_who_waits_too_long_is_told_why() -> None:
    member = Member(at_once=False)

    def answer(timeout_s: float) -> Future[Any]:
        found = Agent.lease_devices(member.agent, timeout_s)
        member.agent.grant(False)
        return found

    member.agent.lease_devices = answer  # type: ignore[method-assign]
    with pytest.raises(LeaseTimeout, match=r"A:0 did not get GPU-a within 3 s: B:0 has had GPU-a for 9.0 s"):
        member.lease().__enter__()
    assert isinstance(LeaseTimeout("x"), TimeoutError)
    assert (member.did, member.agent.returned) == ([], 0)


async def test_async_blocks_share_one_lease() -> None:
    member = Member(at_once=False)
    entered = asyncio.Event()
    leave = asyncio.Event()

    async def use(name: str) -> None:
        async with member.lease():
            member.did.append(name)
            entered.set()
            await leave.wait()

    first, second = asyncio.create_task(use("one")), asyncio.create_task(use("two"))
    await asyncio.sleep(0)
    assert len(member.agent.asked) == 1
    member.agent.grant()
    await entered.wait()
    leave.set()
    await asyncio.gather(first, second)
    assert member.did == ["wake", "one", "two", "sleep"]
    assert member.balance == 0


async def test_who_stops_waiting_keeps_nothing() -> None:
    member = Member(at_once=False)
    waiting = asyncio.create_task(member.lease().__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert member.agent.asked[0].cancelled()
    assert member.balance == 0
    member.agent.at_once = True
    async with member.lease():
        pass
    assert member.balance == 0


async def test_one_of_two_that_wait_may_stop() -> None:
    member = Member(at_once=False)
    first = asyncio.create_task(member.lease().__aenter__())
    second = asyncio.create_task(member.lease().__aenter__())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not member.agent.asked[0].cancelled()
    member.agent.grant()
    lease = await second
    assert member.did == ["wake"]
    await lease.__aexit__(None, None, None)
    assert member.balance == 0


async def test_nobody_works_before_the_member_is_awake() -> None:
    member = Member()
    may_wake = asyncio.Event()

    async def wake() -> None:
        async with member.lease():  # as a method may do that is also called by itself
            await may_wake.wait()
        member.did.append("awake")

    async def use(name: str) -> None:
        async with member.lease(wake=wake):
            member.did.append(name)

    tasks = [asyncio.create_task(use(name)) for name in ("one", "two")]
    for _ in range(10):
        await asyncio.sleep(0)
    assert member.did == []
    may_wake.set()
    await asyncio.gather(*tasks)
    assert member.did[0] == "awake"
    assert sorted(member.did[1:3]) == ["one", "two"]
    assert member.did[3:] == ["sleep"]
    assert member.balance == 0


async def test_all_are_told_if_it_cannot_be_woken() -> None:
    member = Member()

    async def wake() -> None:
        await asyncio.sleep(0)
        raise MemoryError("it does not fit")

    async def use() -> None:
        async with member.lease(wake=wake):
            raise AssertionError

    ends = await asyncio.gather(use(), use(), return_exceptions=True)
    assert [type(end) for end in ends] == [MemoryError, MemoryError]
    assert member.did == ["sleep"]
    assert member.balance == 0


async def test_a_lease_awaits_async_hooks() -> None:
    member = Member()

    async def wake() -> None:
        member.did.append("awake")

    async with member.lease(wake=wake):
        pass
    assert member.did == ["awake", "sleep"]
    with pytest.raises(UsageError, match="async with"):
        member.lease(wake=wake).__enter__()
    assert member.balance == 0


async def test_a_block_that_begins_while_the_member_is_put_to_sleep_waits_for_that() -> None:
    member = Member()
    may_sleep = asyncio.Event()

    async def sleep() -> None:
        await may_sleep.wait()
        member.did.append("asleep")

    async def use(name: str) -> None:
        async with member.lease(sleep=sleep):
            assert member.balance == 1, "the devices of a block that is under way were returned"
            member.did.append(name)

    tasks = [asyncio.create_task(use("one"))]
    for name in ("two", "three", "four"):
        for _ in range(10):
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(use(name)))
    for _ in range(10):
        await asyncio.sleep(0)
    tasks.pop().cancel()
    await asyncio.sleep(0)
    assert member.did == ["wake", "one"] and member.balance == 1
    may_sleep.set()
    await asyncio.gather(*tasks)
    assert member.did[:4] == ["wake", "one", "asleep", "wake"] and sorted(member.did[4:6]) == ["three", "two"]
    assert member.balance == 0


def test_a_block_of_another_thread_waits_while_the_member_is_put_to_sleep() -> None:
    member = Member()
    sleeps, may_sleep = threading.Event(), threading.Event()

    def sleep() -> None:
        sleeps.set()
        assert may_sleep.wait(HANG_S)
        member.did.append("asleep")

    def use(name: str) -> None:
        with member.lease(sleep=sleep):
            member.did.append(name)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(use, "one")
        assert sleeps.wait(HANG_S)
        late = DeviceLease(member.shared, 0.05, None, None)
        with pytest.raises(LeaseTimeout, match=r"still being put to sleep after 0\.05 s"), late:
            pass
        assert member.did == ["wake", "one"] and member.agent.returned == 0
        second = pool.submit(use, "two")
        may_sleep.set()
        first.result(HANG_S)
        second.result(HANG_S)
    assert member.did == ["wake", "one", "asleep", "wake", "two", "asleep"]
    assert member.balance == 0


def test_a_sleep_hook_that_would_wake_the_member_is_told() -> None:
    member = Member()

    def sleep() -> None:
        with member.lease():
            pass

    with pytest.raises(UsageError, match=r"its sleep hook enters device_lease\(\)"), member.lease(sleep=sleep):
        pass
    with member.lease():
        pass
    assert member.agent.returned == 1


def test_a_grant_whose_answer_was_lost_is_returned() -> None:
    member = Member(at_once=False)

    def lost(timeout_s: float) -> Future[Any]:
        found = Agent.lease_devices(member.agent, timeout_s)
        found.set_exception(CallTimeout("no answer"))
        return found

    member.agent.lease_devices = lost  # type: ignore[method-assign]
    with pytest.raises(CallTimeout):
        member.lease().__enter__()
    assert member.balance == 0
