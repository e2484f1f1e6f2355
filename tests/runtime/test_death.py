"""Members that die. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlmesh.errors import PeerLost, RemoteError
from rlmesh.job.status import ExitInfo
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.connections.address_book import MemberAddress
from rlmesh.runtime.group import RoleGroup
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY, Mesh

SERVER = """
import asyncio, os, sys, time, threading
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

class Victim:
    @rpc
    def pid(self): return os.getpid()
    @rpc
    def nap(self, s): time.sleep(s)
    @rpc
    def leave(self, code): sys.exit(code)
    @rpc
    def vanish(self, code): os._exit(code)
    @rpc
    async def wait(self): await asyncio.sleep(60)

runtime = Runtime.start(name="V:0", key=bytes.fromhex(sys.argv[1]), socket_dir=sys.argv[2])
codes = []
def leave(code):
    codes.append(code)
    runtime.stop_main(now=True)
runtime.exit_hook = leave
runtime.serve("V:0", Victim())
print(runtime.endpoint, flush=True)
runtime.run_main()
runtime.close()
time.sleep(float(os.environ.get("SLOW_END_S", "0")))
sys.exit(codes[0] if codes else 0)
"""


@pytest.fixture
def victim(mesh: Mesh) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, KEY.hex(), str(mesh.socket_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    mesh.publish(MemberAddress("V", 0, 0, process.stdout.readline().strip(), pid=process.pid))
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)
        process.stdout.close()
        for leftover in Path(mesh.socket_dir).iterdir():
            leftover.unlink()


def test_a_killed_member_fails_all_its_calls_with_its_last_words(
    mesh: Mesh, victim: subprocess.Popen[str], until: Callable[..., None], own_time: OwnTime
) -> None:
    group: RoleGroup[object] = RoleGroup("V", runtime=mesh.caller)
    assert group[0].call("pid").result() == victim.pid
    futures = [group[0].call("nap", 60) for _ in range(100)]
    until(lambda: len(mesh.caller.activity.pending()) == 100)
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    victim.wait(HANG_S)
    mesh.caller.member_lost(
        ExitInfo("V", 0, 0, victim.pid, None, 9, time.time(), hostname="h", last_log_lines=("out of luck",))
    )
    for future in futures:
        with pytest.raises(PeerLost, match=r"V rank 0 \(pid \d+ on h\) killed by SIGKILL.*\n.*out of luck") as caught:
            future.result(HANG_S)
        assert (caught.value.role, caught.value.rank, caught.value.executed) == ("V", 0, "maybe")
    assert own_time.since(killed_at) < 1
    with pytest.raises(PeerLost, match="SIGKILL") as again:
        group[0].call("pid").result(HANG_S)
    assert again.value.executed == "no"


def test_a_member_that_dies_before_it_is_up_fails_the_calls_that_wait_for_it(mesh: Mesh) -> None:
    mesh.publish(MemberAddress("LATE", 0, 0, None), MemberAddress("LATE", 1, 0, None))
    group: RoleGroup[object] = RoleGroup("LATE", runtime=mesh.caller)
    future, other = group[0].call("echo", 1), group[1].call("echo", 1)
    mesh.caller.member_lost(ExitInfo("LATE", 0, 0, 7, 1, None, time.time(), last_log_lines=("ValueError: no luck",)))
    with pytest.raises(PeerLost, match=r"LATE rank 0 \(pid 7\) exited with code 1.*\n.*no luck") as caught:
        future.result(HANG_S)
    assert caught.value.executed == "no" and not other.done()
    assert other.cancel()


def test_without_the_agents_word_calls_fail_after_a_short_grace(
    mesh: Mesh, victim: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, own_time: OwnTime
) -> None:
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.2)
    group: RoleGroup[object] = RoleGroup("V", runtime=mesh.caller)
    group[0].call("pid").result()
    began = time.monotonic()
    future = group[0].call("vanish", 3)
    with pytest.raises(PeerLost, match="closed by the peer"):
        future.result(HANG_S)
    with pytest.raises(PeerLost):
        group[0].call("pid").result(HANG_S)
    assert own_time.since(began) < 5


def test_a_process_that_takes_its_time_to_end_is_waited_for(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, until: Callable[..., None]
) -> None:
    """Exit handlers, and the end of an interpreter that has loaded much: how it ended is known only afterwards."""
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.4)
    monkeypatch.setenv("SLOW_END_S", "1")
    victim: subprocess.Popen[str] = request.getfixturevalue("victim")
    group: RoleGroup[object] = RoleGroup("V", runtime=mesh.caller)
    waiting = group[0].call("wait")
    assert group[0].call("leave", 3).exception(HANG_S) is not None
    until(lambda: "the connection was closed" in waiting.waiting_for())
    later = group[0].call("pid")
    assert victim.wait(HANG_S) == 3
    assert not waiting.done() and not later.done(), "its agent has not told yet"
    mesh.caller.member_lost(ExitInfo("V", 0, 0, victim.pid, 3, None, time.time(), hostname="h"))
    for future, executed in ((waiting, "maybe"), (later, "no")):
        with pytest.raises(PeerLost, match=r"V rank 0 \(pid \d+ on h\) exited with code 3") as caught:
            future.result(HANG_S)
        assert caught.value.executed == executed


def test_sys_exit_in_a_method_is_answered_and_ends_the_process(mesh: Mesh, victim: subprocess.Popen[str]) -> None:
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        RoleGroup("V", runtime=mesh.caller)[0].call("leave", 3).result(HANG_S)
    assert victim.wait(HANG_S) == 3
