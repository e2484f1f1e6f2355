"""Whom somebody waits for, and what is known of that member."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from rlmesh.job.status import ExitInfo
from rlmesh.runtime.calling.peer_status import process_state
from rlmesh.runtime.connections.address_book import MemberAddress
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh
from tests.settling import settle


class Member:
    def __init__(self) -> None:
        self.release = threading.Event()

    @rpc
    def wait(self) -> None:
        self.release.wait(20)

    @rpc
    def next_in_line(self) -> None: ...


def test_a_pending_future_tells_what_is_known_of_its_member(mesh: Mesh, until: Callable[..., None]) -> None:
    member = Member()
    group = mesh.serve("A", member)
    mesh.addresses[:] = [MemberAddress("A", 0, 0, mesh.addresses[0].endpoint, pid=os.getpid())]
    mesh.publish(MemberAddress("B", 0, 0, None))
    mesh.caller.outbound.peers.last_line_of = lambda role, rank: f"{role}-{rank} said this"
    future = group[0].call("wait")
    queued = group[0].call("next_in_line")
    until(lambda: "(connected; process" in future.waiting_for())
    text = future.waiting_for()
    assert text.startswith("A:0.wait() for ")
    assert f"(connected; process {os.getpid()} " in text and text.endswith("; its last line: A-0 said this")
    unbound = RoleGroup("B", runtime=mesh.caller).call("wait")
    assert "1 of 1 members" in unbound.waiting_for() and "its address is not known yet" in unbound.waiting_for()
    until(lambda: len(mesh.runtimes[-1].activity.serving()) == 2 and len(mesh.caller.activity.pending()) == 3)
    waiting = mesh.caller.activity.waiting()
    assert [(w.name, w.method) for w in waiting] == [("A:0", "wait"), ("A:0", "next_in_line"), ("B:0", "wait")]
    assert 0 < waiting[0].since_s < 60 and 1700 < waiting[0].left_s < 1800
    until(lambda: mesh.runtimes[-1].activity.serving()[0].runs)
    running, in_line = mesh.runtimes[-1].activity.serving()
    assert str(running).startswith("A:0.wait() for caller runs for ")
    assert str(in_line).startswith("A:0.next_in_line() for caller is queued for ")
    member.release.set()
    future.result(HANG_S)
    queued.result(HANG_S)
    assert unbound.cancel() and mesh.caller.activity.waiting() == ()
    until(lambda: mesh.runtimes[-1].activity.serving() == ())


def test_a_dead_members_end_is_told(mesh: Mesh, until: Callable[..., None]) -> None:
    mesh.publish(MemberAddress("A", 0, 0, None))
    mesh.caller.member_lost(ExitInfo("A", 0, 0, 7, None, 9, time.time(), hostname="h"))
    settle(mesh.caller)
    failed = RoleGroup("A", runtime=mesh.caller)[0].call("wait").exception(HANG_S)
    assert "A rank 0 (pid 7 on h) killed by SIGKILL" in str(failed)


def test_states_of_processes_are_told(until: Callable[..., None]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        until(lambda: process_state(process.pid) == f"process {process.pid} sleeps")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: process_state(process.pid) == f"process {process.pid} is stopped")
        process.kill()
        until(lambda: process_state(process.pid) == f"process {process.pid} has ended")
    finally:
        process.kill()
        process.wait(HANG_S)
    assert process_state(process.pid) == f"process {process.pid} is gone" and process_state(0) == ""


@pytest.mark.parametrize("count", [3, 12])
def test_large_groups_are_not_listed_in_full(mesh: Mesh, count: int) -> None:
    mesh.publish(*[MemberAddress("A", rank, 0, None) for rank in range(count)])
    future = RoleGroup("A", runtime=mesh.caller).call("wait")
    text = future.waiting_for()
    assert f"{count} of {count} members" in text and text.count("A:") == min(count, 8)
    assert ("and 4 more" in text) == (count == 12)
    future.cancel()
