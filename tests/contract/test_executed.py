"""What a failed call says of whether its method ran: ``no``, ``maybe`` or ``yes``; and who is held back, and how."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlmesh.errors import (
    CallCancelled,
    CallError,
    CallTimeout,
    MailboxFull,
    PayloadTooLarge,
    PeerLost,
    StaleIncarnation,
    Unserializable,
)
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import Mesh


class Member:
    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.started = threading.Event()
        self.release = threading.Event()

    @rpc
    def hold(self, x: Any = None) -> Any:
        self.ran.append(x)
        self.started.set()
        self.release.wait(20)
        return x

    @rpc(concurrent=4)
    def beside(self, x: Any = None) -> Any:
        return x

    @rpc
    async def nap(self, seconds: float) -> None:
        self.started.set()
        await asyncio.sleep(seconds)

    @rpc
    def fail(self) -> None:
        raise ValueError("no")

    @rpc
    def unsendable(self) -> Any:
        return threading.Lock()

    @rpc
    def large(self, n: int) -> bytes:
        return bytes(n)


def executed(future: Any) -> tuple[type[BaseException], str, str, int | None, str | None]:
    error = future.exception(HANG_S)
    assert isinstance(error, CallError), error
    return type(error), error.executed, error.role or "", error.rank, error.method


def test_a_method_that_raised_ran(mesh: Mesh) -> None:
    handle = mesh.serve("A", Member())[0]
    for method in ("fail", "unsendable"):
        error: Any = handle.call(method).exception(HANG_S)
        assert (error.executed, error.role, error.rank, error.method) == ("yes", "A", 0, method)


def test_a_call_for_another_incarnation_did_not_run(mesh: Mesh) -> None:
    member = Member()
    mesh.serve("A", member)
    handle = mesh.caller.peer("A:0", mesh.addresses[0].endpoint or "", incarnation=3)
    assert executed(handle.call("fail")) == (StaleIncarnation, "no", "A", 0, "fail")


def test_death_says_maybe_of_what_was_sent_and_no_of_what_comes_later(mesh: Mesh) -> None:
    member = Member()
    group = mesh.serve("A", member)
    assert group[0].call("beside", 3).result() == 3
    running, queued = group[0].call("nap", 30), group[0].call("nap", 30)
    assert member.started.wait(HANG_S)
    mesh.kill("A", 0)
    for future in (running, queued):
        assert executed(future) == (PeerLost, "maybe", "A", 0, "nap")
        assert "killed by SIGKILL" in str(future.exception())
    later = group[0].call("beside")
    assert executed(later)[:2] == (PeerLost, "no") and "killed by SIGKILL" in str(later.exception())
    assert mesh.caller.activity.pending() == []


def test_a_deadline_says_maybe(mesh: Mesh, until: Callable[..., None]) -> None:
    member = Member()
    group = mesh.serve("A", member)
    assert group[0].call("beside", 3).result() == 3  # connects: the deadline is for the call alone
    hasty = group.options(timeout_s=0.3)[0]
    assert executed(hasty.call("hold")) == (CallTimeout, "maybe", "A", 0, "hold")
    queued = executed(hasty.call("hold", "queued"))
    assert queued[0] is CallTimeout
    assert group[0].call("beside", 4).result() == 4  # What was sent before has arrived: that call, and its end.
    until(lambda: len(mesh.runtimes[-1].activity.serving()) == 1)
    member.release.set()
    assert group[0].call("fail").exception(HANG_S) is not None
    assert member.ran == [None], "a call whose deadline passed in the queue never starts"


def test_a_deadline_before_there_is_an_address_says_no(mesh: Mesh) -> None:
    from rlmesh.runtime.connections.address_book import MemberAddress
    from rlmesh.runtime.group import RoleGroup

    mesh.publish(MemberAddress("LATE", 0, 0, None))
    group: RoleGroup[Any] = RoleGroup("LATE", runtime=mesh.caller)
    assert executed(group.options(timeout_s=0.05)[0].call("fail")) == (CallTimeout, "no", "LATE", 0, "fail")


def test_what_is_too_large_is_refused_where_it_is_made(mesh: Mesh) -> None:
    member = Member()
    group = mesh.serve("A", member)
    for runtime in mesh.runtimes:
        runtime.outbound.network = replace(runtime.network, max_payload_bytes=1 << 20)
    with pytest.raises(PayloadTooLarge, match=r"2,000,\d+ bytes are more than .* 1,048,576 bytes"):
        group[0].call("hold", bytes(2_000_000))
    assert member.ran == []
    error: Any = group[0].call("large", 2_000_000).exception(HANG_S)
    assert isinstance(error, PayloadTooLarge) and error.executed == "yes"  # type: ignore[attr-defined]
    assert len(group[0].call("large", 1000).result()) == 1000


def test_an_argument_that_cannot_be_sent_is_named(mesh: Mesh) -> None:
    group = mesh.serve("A", Member(), Member())
    for call, name in (
        (lambda: group[0].call("hold", threading.Lock()), "argument 1"),
        (lambda: group.call("hold", x=threading.Lock()), "argument 'x'"),
        (lambda: group.stream("hold", 1, bytes(10_000), [threading.Lock()]), "argument 3"),
        (lambda: group.notify("hold", bytes(10_000), threading.Lock()), "argument 2"),
    ):
        with pytest.raises(Unserializable, match=rf"^{name} of hold\(\): a value of .* cannot be sent .*lock"):
            call()
    assert mesh.caller.activity.pending() == []


def test_a_full_window_holds_a_thread_back_and_never_a_loop(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None], own_time: OwnTime
) -> None:
    monkeypatch.setattr(peer_connections, "WINDOW", 4)
    member = Member()
    handle = mesh.serve("A", member)[0]
    handle.call("beside").result()
    made: list[Any] = []

    def make() -> None:
        made.extend(handle.call("hold", number) for number in range(20))

    thread = threading.Thread(target=make)
    began = time.monotonic()

    async def on_a_loop() -> list[Any]:
        return [handle.call("hold", number) for number in range(20)]

    on_loop = asyncio.run(on_a_loop())
    assert own_time.since(began) < 2, "a loop is not held back"
    assert len(mesh.caller.activity.pending()) == 20
    assert executed(handle.options(queue=False).call("hold"))[:2] == (MailboxFull, "no")
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive() and len(made) == 0, "a plain thread is"
    member.release.set()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert [future.result(HANG_S) for future in on_loop + made] == list(range(20)) * 2
    assert member.ran == list(range(20)) * 2, "nothing is dropped or overtaken"


def test_a_cancelled_call_that_waits_in_line_is_never_sent(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "WINDOW", 2)
    member = Member()
    handle = mesh.serve("A", member)[0]

    async def on_a_loop() -> list[Any]:
        return [handle.call("hold", number) for number in range(6)]

    futures = asyncio.run(on_a_loop())
    assert member.started.wait(HANG_S)
    assert all(future.cancel() for future in futures[1::2])
    with pytest.raises(CallCancelled, match=r"A:0\.hold\(\)"):
        futures[1].result()
    member.release.set()
    assert [future.result(HANG_S) for future in futures[::2]] == [0, 2, 4]
    assert [x for x in member.ran if x != 1] == [0, 2, 4], "1 had been sent"
