"""Members that die, and peers that do not belong to the job. Real processes, real signals."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from rlmesh.errors import AuthenticationFailed, PeerLost, RemoteError
from rlmesh.job.status import ExitInfo
from rlmesh.runtime import calls
from rlmesh.runtime.address import MemberAddress
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.runtime.conftest import KEY, Mesh

SERVER = """
import os, sys, time, threading
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
        process.wait(10)
        process.stdout.close()
        for leftover in Path(mesh.socket_dir).iterdir():
            leftover.unlink()


def test_a_killed_member_fails_all_its_calls_with_its_last_words(
    mesh: Mesh, victim: subprocess.Popen[str], until: Callable[..., None]
) -> None:
    group: RoleGroup[object] = RoleGroup("V", runtime=mesh.caller)
    assert group[0].call("pid").result() == victim.pid
    futures = [group[0].call("nap", 60) for _ in range(100)]
    until(lambda: len(mesh.caller.pending()) == 100)
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    victim.wait(10)
    mesh.caller.member_lost(
        ExitInfo("V", 0, 0, victim.pid, None, 9, time.time(), hostname="h", last_log_lines=("out of luck",))
    )
    for future in futures:
        with pytest.raises(PeerLost, match=r"V rank 0 \(pid \d+ on h\) killed by SIGKILL.*\n.*out of luck") as caught:
            future.result(5)
        assert (caught.value.role, caught.value.rank, caught.value.executed) == ("V", 0, "maybe")
    assert time.monotonic() - killed_at < 1
    with pytest.raises(PeerLost, match="SIGKILL") as again:
        group[0].call("pid").result(5)
    assert again.value.executed == "no"


def test_without_the_agents_word_calls_fail_after_a_short_grace(
    mesh: Mesh, victim: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOSS_GRACE_S", 0.2)
    group: RoleGroup[object] = RoleGroup("V", runtime=mesh.caller)
    group[0].call("pid").result()
    future = group[0].call("vanish", 3)
    with pytest.raises(PeerLost, match="closed by the peer"):
        future.result(5)
    with pytest.raises(PeerLost):
        group[0].call("pid").result(5)


def test_sys_exit_in_a_method_is_answered_and_ends_the_process(mesh: Mesh, victim: subprocess.Popen[str]) -> None:
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        RoleGroup("V", runtime=mesh.caller)[0].call("leave", 3).result(5)
    assert victim.wait(10) == 3


def say_as_a_stranger(endpoint: str, packets: list[bytes]) -> None:
    scheme, _, path = endpoint.partition("://")
    if scheme == "unix":
        for packet in packets:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(path)
                try:
                    stranger.sendall(packet)
                    stranger.recv(1)
                except OSError:
                    pass  # It was thrown out before it had said all.
        return
    with zmq.Context() as context:
        for packet in packets:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(endpoint)
            dealer.send(packet)
            dealer.close(1000)


def test_code_from_strangers_is_never_decoded(mesh: Mesh, until: Callable[..., None], tmp_path: Path) -> None:
    class Served:
        @rpc
        def echo(self, x: int) -> int:
            return x

    group = mesh.serve("A", Served())
    runtime = mesh.runtimes[-1]
    marker = tmp_path / "pwned"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {marker}",)

    packets = [pickle.dumps(Evil()), os.urandom(1_000_000), b"\0" * 100]
    say_as_a_stranger(runtime.endpoint or "", packets)
    until(lambda: runtime.strangers.total == 3)

    with Runtime.start(name="imposter", key=b"another key of the right length!", bind=False) as imposter:
        future = imposter.peer("A:0", runtime.endpoint or "").options(timeout_s=0.5).call("echo", Evil())
        with pytest.raises(AuthenticationFailed, match="does not hold the key"):
            future.result()
    assert not marker.exists()
    assert group[0].call("echo", 1).result() == 1
