"""Handles of running jobs, over a driver that a test controls."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest

from rlmesh.driver.driver import Driver, JobResult
from rlmesh.driver.handle import JobHandle
from rlmesh.errors import JobFailed, LaunchError
from rlmesh.job.status import JobStatus
from tests.own_time import HANG_S

STATUS = JobStatus("demo", "demo-1", "running", 0.0, "/runs/demo")
RESULT = JobResult(STATUS, Path("/runs/demo"))


class FakeDriver:
    job_name = "demo"
    status = STATUS

    def __init__(self, outcome: JobResult | BaseException = RESULT) -> None:
        self.outcome = outcome
        self.go_on = threading.Event()
        self.reasons: list[str] = []

    def run(self) -> JobResult:
        assert self.go_on.wait(HANG_S)
        if self.reasons:
            raise KeyboardInterrupt(f"job demo was stopped: {self.reasons[0]}")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)
        self.go_on.set()


def handle_of(driver: FakeDriver) -> JobHandle:
    return JobHandle(cast(Driver, driver))


async def result_of(handle: JobHandle) -> JobResult:
    return await handle


FAILED = JobFailed("job demo failed", [LaunchError("the agent died")])


def test_a_thread_waits_for_the_result() -> None:
    driver = FakeDriver()
    handle = handle_of(driver)
    assert (handle.job_name, handle.status, handle.done()) == ("demo", STATUS, False)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    driver.go_on.set()
    assert handle.result(HANG_S) is RESULT
    assert handle.done()
    handle.stop()
    assert driver.reasons == []


def test_a_failure_is_raised() -> None:
    driver = FakeDriver(FAILED)
    driver.go_on.set()
    with pytest.raises(JobFailed) as caught:
        handle_of(driver).result(HANG_S)
    assert caught.value is FAILED


def test_a_stopped_job_says_so() -> None:
    handle = handle_of(FakeDriver())
    handle.stop("enough")
    with pytest.raises(JobFailed, match="job demo was stopped: enough") as caught:
        handle.result(HANG_S)
    assert caught.value.run_dir == "/runs/demo"


async def test_a_loop_awaits_the_result() -> None:
    driver = FakeDriver()
    async with handle_of(driver) as handle:
        asyncio.get_running_loop().call_later(0.01, driver.go_on.set)
        assert await handle is RESULT
        assert await handle is RESULT
    assert driver.reasons == []


async def test_leaving_the_block_ends_the_job() -> None:
    driver = FakeDriver()
    async with handle_of(driver) as handle:
        pass
    assert handle.done()
    assert driver.reasons == ["the block of start() was left"]


async def test_the_error_of_the_block_wins() -> None:
    driver = FakeDriver(FAILED)
    with pytest.raises(ValueError, match="mine"):
        async with handle_of(driver):
            raise ValueError("mine")
    driver = FakeDriver(FAILED)
    driver.go_on.set()
    with pytest.raises(JobFailed, match="job demo failed"):
        async with handle_of(driver) as handle:
            waiter = asyncio.create_task(result_of(handle))
            await asyncio.wait({waiter})
            assert waiter.exception() is FAILED


async def test_cancelling_a_waiter_does_not_stop_the_job() -> None:
    driver = FakeDriver()
    handle = handle_of(driver)
    waiter = asyncio.create_task(result_of(handle))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (handle.done(), driver.reasons) == (False, [])
    driver.go_on.set()
    assert await handle is RESULT
