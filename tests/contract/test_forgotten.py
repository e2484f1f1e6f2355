"""Calls that fail and whose results nobody asks for: told once, and never where somebody knows already."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlmesh.agent.worker.control import Terminated
from rlmesh.errors import RemoteError
from rlmesh.runtime.calling import unretrieved
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh

SAID = "its result was never asked for"


class Worker:
    def __init__(self) -> None:
        self.gate = threading.Event()

    @rpc
    def fails(self, *_: Any) -> None:
        raise ValueError("lost?")

    @rpc
    def batch(self, items: list[int]) -> list[int]:
        raise ValueError("lost?")

    @rpc
    def items(self) -> Iterator[int]:
        raise ValueError("lost?")
        yield 1

    @rpc
    def is_told_to_end(self) -> None:
        raise Terminated

    @rpc
    def waits(self) -> None:
        self.gate.wait(HANG_S)
        raise ValueError("late")

    @rpc
    def echo(self, value: Any) -> Any:
        return value


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what tests before have forgotten is told now
    monkeypatch.setattr(unretrieved, "_limiter", unretrieved.RepeatLimiter())


@pytest.mark.case("n16")
def test_many_alike_are_told_as_one() -> None:
    limiter, kind, other = unretrieved.RepeatLimiter(), ("W:0.f()", "ValueError"), ("W:0.f()", "KeyError")
    assert [limiter.skipped(kind, now) for now in (0.0, 1.0, 9.9)] == [0, None, None]
    assert [limiter.skipped(other, 5.0), limiter.skipped(kind, 10.1), limiter.skipped(kind, 30.0)] == [0, 2, 0]


def all_done(group: Any) -> None:
    """Whatever was sent before is answered: a member runs one call after the other."""
    group.call("echo", 1).result(HANG_S)


@pytest.mark.case("n16")
@pytest.mark.parametrize(
    "forget",
    [
        lambda group: group[1].call("fails"),
        lambda group: group.call("fails"),
        lambda group: group.call_any("fails"),
        lambda group: group.call_batch("batch", 4, [1, 2, 3, 4]),
        lambda group: group.options(idempotent=True)[0].call("fails"),
        lambda group: concurrent.futures.wait([group[0].call("fails")], HANG_S),
        lambda group: group[0].call("fails").add_done_callback(lambda _: None),
    ],
    ids=["member", "group", "any", "batch", "idempotent", "waited", "callback"],
)
def test_a_failure_that_nobody_asks_for_is_told_once(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, until: Callable[..., None], forget: Callable[[Any], object]
) -> None:
    group = mesh.serve("WORKER", Worker(), Worker())
    forget(group)
    until(lambda: bool(told(caplog)))
    all_done(group)
    (message,) = told(caplog)
    assert message.startswith("WORKER:") and "ValueError: lost?" in message
    assert "fails()" in message or "batch()" in message
    assert "test_forgotten.py" in message, "with the place where it was raised"
    assert caplog.records[-1].levelno == logging.ERROR


@pytest.mark.case("n16")
def test_a_stream_that_nobody_takes_items_of(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    group = mesh.serve("WORKER", Worker(), Worker())
    stream = group.stream("items")
    all_done(group)
    ready = stream._inbox._ready
    until(lambda: len(ready) == 2)
    del stream
    until(lambda: bool(told(caplog)))
    assert len(told(caplog)) == 1


@pytest.mark.case("n16")
def test_nothing_is_told_to_those_who_know(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    workers = Worker(), Worker()
    group = mesh.serve("WORKER", *workers)
    for future in (group[0].call("fails"), group.call("fails")):
        with pytest.raises(RemoteError):
            future.result(HANG_S)
    assert group.call("fails").exception(HANG_S) is not None
    group.options(return_exceptions=True).call("fails").result(HANG_S)
    results = group.call_batch("batch", 4, [1, 2, 3, 4])
    with pytest.raises(RemoteError):
        results[0]
    del results
    for ask in (list, lambda results: results.result(HANG_S), lambda results: results[-1]):
        with pytest.raises(RemoteError):
            ask(group.call_batch("batch", 4, [1, 2, 3, 4]))
    with pytest.raises(RemoteError):
        group[0].call("echo", group[1].call("fails")).result(HANG_S)
    with group.stream("items") as stream, pytest.raises(RemoteError):
        next(stream)

    async def awaited() -> None:
        await asyncio.gather(group[0].call("fails"), group.call("fails"), return_exceptions=True)
        with pytest.raises(RemoteError):
            await group.call_batch("batch", 4, [1, 2, 3, 4])
        with pytest.raises(RemoteError):
            async for _ in group.call_batch("batch", 4, [1, 2, 3, 4]):
                pass
        with pytest.raises(RemoteError):
            async for _ in group.call_batch("batch", 4, [1, 2, 3, 4]).as_completed():
                pass

    asyncio.run(awaited())
    cancelled = group.call("waits")
    cancelled.cancel()
    del cancelled
    for worker in workers:
        worker.gate.set()
    all_done(group)
    assert told(caplog) == []


@pytest.mark.case("n16")
def test_a_method_that_the_end_of_its_member_cuts_off_is_not_told(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    group = mesh.serve("WORKER", Worker(), Worker())
    group.call("is_told_to_end")
    all_done(group)
    assert told(caplog) == []
    group.call("fails")
    all_done(group)
    assert len(told(caplog)) == 1


@pytest.mark.case("n16")
def test_nothing_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with Mesh() as mesh:
        worker = Worker()
        mesh.serve("WORKER", worker).call("waits")
        worker.gate.set()
        mesh.runtimes[0].close()
    with Mesh() as mesh:
        worker = Worker()
        group = mesh.serve("WORKER", worker)
        group.call("waits")
        mesh.caller.close()
        worker.gate.set()
    assert told(caplog) == []


@pytest.mark.case("n16")
def test_a_notification_that_fails_is_told_by_its_receiver(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    group = mesh.serve("WORKER", Worker(), Worker())
    group[1].notify("fails")
    all_done(group)
    until(lambda: any("WORKER:1.fails() failed" in record.getMessage() for record in caplog.records))
    (record,) = [record for record in caplog.records if "failed" in record.getMessage()]
    assert "notification" in record.getMessage() and "ValueError: lost?" in record.getMessage()
    assert told(caplog) == []
