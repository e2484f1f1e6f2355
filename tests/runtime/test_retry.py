"""Calls that are made again, and those that must not be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, PeerLost, Restarting, StaleIncarnation
from rlmesh.job.status import ExitInfo
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.calling.retry import MAX_ATTEMPTS, pause_before_retry
from rlmesh.runtime.connections.address_book import MemberAddress, member_name
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.transport.base import Link
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import Mesh
from tests.settling import settle

LOST = PeerLost("gone", executed="maybe")


@pytest.mark.parametrize(
    ("error", "attempt", "left_s", "gone", "allowed"),
    [
        (LOST, 1, 10, False, True),
        (PeerLost("gone", executed="no"), 1, 10, False, True),
        (PeerLost("gone", executed="yes"), 1, 10, False, False),
        (StaleIncarnation("old", executed="no"), 1, 10, False, True),
        (Restarting("soon", executed="no"), 1, 10, False, True),
        (LOST, 1, 10, True, False),
        (LOST, 1, 0.01, False, False),
        (LOST, MAX_ATTEMPTS, 10, False, False),
        (CallTimeout("late", executed="maybe"), 1, 10, False, False),
        (ValueError("an answer"), 1, 10, False, False),
    ],
)
def test_when_a_call_is_made_again(error: Exception, attempt: int, left_s: float, gone: bool, allowed: bool) -> None:
    assert (pause_before_retry(error, attempt, left_s, gone=gone) is not None) == allowed


def test_pauses_grow() -> None:
    pauses = [pause_before_retry(LOST, attempt, 100, gone=False) or 0 for attempt in range(1, MAX_ATTEMPTS)]
    assert pauses == sorted(pauses) and 0 < pauses[0] < pauses[-1] <= 1


class Member:
    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0

    @rpc
    async def slow_once(self, x: int) -> int:
        self.begun += 1
        if self.begun == 1:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return x

    @rpc
    def fail(self) -> None:
        self.begun += 1
        raise ValueError("every time")

    @rpc
    def echo(self, x: Any) -> Any:
        return x


def break_connections(mesh: Mesh) -> None:
    """Whoever called the runtime that was made last loses its connection; the process lives on."""
    server = mesh.runtimes[-1]

    def cut(link: Link) -> None:
        link.close()
        server.inbound.on_lost(link, "it was cut")

    for link in list(server.inbound.channels):
        server.post(cut, link)


def test_an_idempotent_call_survives_a_broken_connection(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)
    member = Member()
    group = mesh.serve("A", member)
    future = group.options(idempotent=True)[0].call("slow_once", 5)
    until(lambda: member.begun == 1)
    break_connections(mesh)
    assert future.result(HANG_S) == 5
    assert member.begun == 2, "it was made again once"
    assert group[0].call("echo", 6).result() == 6


def test_other_calls_are_told(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]) -> None:
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)
    member = Member()
    future = mesh.serve("A", member)[0].call("slow_once", 5)
    until(lambda: member.begun == 1)
    break_connections(mesh)
    with pytest.raises(PeerLost) as caught:
        future.result(HANG_S)
    assert caught.value.executed == "maybe" and member.begun == 1


def test_what_the_method_raises_is_an_answer(mesh: Mesh) -> None:
    member = Member()
    group = mesh.serve("A", member)
    with pytest.raises(ValueError, match="every time") as caught:
        group.options(idempotent=True).call("fail").result(HANG_S)
    assert member.begun == 1 and caught.value.executed == "yes"  # type: ignore[attr-defined]


def test_a_call_for_an_older_incarnation_finds_the_new_one(mesh: Mesh) -> None:
    runtime = mesh.start("A:0")
    runtime.serve(member_name("A", 0), Member(), incarnation=1)
    mesh.publish(MemberAddress("A", 0, 0, runtime.endpoint))
    group: RoleGroup[Any] = RoleGroup("A", runtime=mesh.caller)
    with pytest.raises(StaleIncarnation, match="meant for incarnation 0; this is incarnation 1") as caught:
        group[0].call("echo", 1).result()
    assert caught.value.executed == "no"
    future = group.options(idempotent=True)[0].call("echo", 2)
    mesh.addresses[:] = [MemberAddress("A", 0, 1, runtime.endpoint)]
    mesh.publish(MemberAddress("X", 0, 0, None))
    assert future.result(HANG_S) == 2


def test_a_dead_member_is_not_called_again(mesh: Mesh, until: Callable[..., None], own_time: OwnTime) -> None:
    mesh.serve("A", Member())
    mesh.caller.member_lost(ExitInfo("A", 0, 0, 1, None, 9, time.time()))
    settle(mesh.caller)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="SIGKILL"):
        RoleGroup("A", runtime=mesh.caller).options(idempotent=True)[0].call("echo", 1).result(HANG_S)
    assert own_time.since(started) < 0.5


def test_cancelling_and_deadlines_hold_for_all_attempts(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)
    member = Member()
    handle = mesh.serve("A", member)[0].options(idempotent=True)
    future = handle.call("slow_once", 1)
    until(lambda: member.begun == 1)
    assert "A:0.slow_once()" in future.waiting_for()
    assert future.cancel()
    until(lambda: member.cancelled == 1)
    member.begun = 0
    with pytest.raises(CallTimeout):
        handle.options(timeout_s=0.2).call("slow_once", 1).result()
    until(lambda: mesh.caller.activity.pending() == [])
