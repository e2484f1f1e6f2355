"""A caller that does not take its answers in: what a member holds for it is bounded, and it is cut off in the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import PeerLost
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.connections import inbound
from rlmesh.runtime.process import clock
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.serving import reply_backlog
from rlmesh.runtime.serving.reply_backlog import Backlog
from rlmesh.wire.envelope import Frames
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh

MIB = 1 << 20
CALLS = 120


class Member:
    def __init__(self) -> None:
        self.ran = 0
        self.gate = threading.Event()

    def _make(self, number: int) -> Any:
        self.gate.wait(HANG_S)
        self.ran += 1
        return np.full(2 * MIB, number, np.uint8)

    @rpc
    def make(self, number: int) -> Any:
        return self._make(number)

    @rpc
    async def make_async(self, number: int) -> Any:
        return self._make(number)

    @rpc(concurrent=4)
    def make_in_pool(self, number: int) -> Any:
        return self._make(number)

    @rpc(concurrent=4)
    async def make_together(self, number: int) -> Any:
        await asyncio.sleep(0)
        return self._make(number)

    @rpc
    def echo(self, value: Any) -> Any:
        return value


@contextmanager
def stopped(runtime: Runtime) -> Iterator[None]:
    """The runtime's loop stands still, as if the process was stopped."""
    begun, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        go_on.wait(HANG_S)

    runtime.post(stand)
    assert begun.wait(HANG_S)
    try:
        yield
    finally:
        go_on.set()


def quiet(until: Callable[..., None], member: Member, other: Any) -> None:
    """Until the member runs nothing more: rounds through its queues change nothing."""

    def same() -> bool:
        before = member.ran
        for _ in range(20):
            other.call("echo", 1).result(HANG_S)
        return before > 0 and member.ran == before

    until(same)


@pytest.mark.case("a09")
@pytest.mark.parametrize("method", ["make", "make_async", "make_in_pool", "make_together"])
def test_what_a_member_holds_is_bounded(mesh: Mesh, until: Callable[..., None], method: str) -> None:
    member = Member()
    group = mesh.serve("A", member)
    with Runtime.start(name="other", key=mesh.key, bind=False) as second:
        other = second.peer("A:0", mesh.addresses[0].endpoint or "")
        other.call("echo", 1).result(HANG_S)
        group[0].call("echo", 1).result(HANG_S)
        futures = [group[0].options(timeout_s=HANG_S).call(method, number % 250) for number in range(CALLS)]
        until(lambda: len(mesh.runtimes[-1].activity.serving()) == CALLS)
        with stopped(mesh.caller):
            member.gate.set()
            quiet(until, member, other)
            held = member.ran
        assert held * 2 * MIB <= reply_backlog.LIMIT_BYTES + 16 * MIB, "not all of the answers"
        for number, future in enumerate(futures):
            assert (future.result(HANG_S) == number % 250).all()
    assert member.ran == CALLS, "each ran once"


@pytest.mark.case("a09")
def test_who_takes_nothing_is_cut_off(
    mesh: Mesh, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reply_backlog, "CUT_OFF_S", 0.5)
    monkeypatch.setattr(inbound, "CHECK_S", 0.1)
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)
    member = Member()
    group = mesh.serve("A", member)
    group[0].call("echo", 1).result(HANG_S)
    futures = [group[0].options(timeout_s=HANG_S).call("make", number % 250) for number in range(CALLS)]
    until(lambda: len(mesh.runtimes[-1].activity.serving()) == CALLS)
    with stopped(mesh.caller):
        member.gate.set()
        until(lambda: "cuts" in caplog.text)
    assert "has not received" in caplog.text and "of its calls wait" in caplog.text
    errors = [future.exception(HANG_S) for future in futures]
    assert any(isinstance(error, PeerLost) for error in errors)
    assert member.ran < CALLS


@pytest.mark.case("a09")
def test_a_caller_that_reads_is_never_behind(mesh: Mesh, until: Callable[..., None]) -> None:
    member = Member()
    member.gate.set()
    group = mesh.serve("A", member)
    for _ in range(3):
        futures = [group[0].call("make", number) for number in range(60)]
        assert [int(future.result(HANG_S)[0]) for future in futures] == list(range(60))
    until(lambda: all(channel.backlog.unreceived_bytes <= 2 * reply_backlog.TELL_BYTES for channel in _channels(mesh)))


def _channels(mesh: Mesh) -> list[Any]:
    return [channel for runtime in mesh.runtimes for channel in runtime.inbound.channels.values()]


@pytest.mark.case("a09")
def test_an_account_owes_what_was_sent_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    account, peer, call = Backlog(), Backlog(), object()
    large: Frames = [b"head", bytes(8 * MIB)]
    small: Frames = [b"small"]
    for _ in range(7):
        account.sent(small)
        account.sent(large)
        assert peer.on_received(small) == 0
    assert not account.set_aside(call)
    account.sent(large)
    assert account.is_behind and account.set_aside(call)
    now[0] += reply_backlog.CUT_OFF_S - 1
    assert not account.is_stuck(now[0])
    for _ in range(4):
        assert account.on_taken(peer.on_received(large)) == []
    now[0] += 2
    assert not account.is_stuck(now[0]), "it takes some in"
    assert account.on_taken(peer.on_received(large)) == [call] and not account.is_behind
