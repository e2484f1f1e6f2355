"""Methods that fail in every way: the caller always learns what happened, and the member goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, GroupCallError, PeerLost, RemoteError, RLMeshError
from rlmesh.job.status import ExitInfo
from rlmesh.runtime.connections.address_book import MemberAddress
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY, Mesh


class TwoArguments(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code, self.why = code, why


class HoldsALock(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even this fails")


class Stop(BaseException):
    """Not an Exception."""


class Member:
    inner: Any = None

    @rpc
    def two_arguments(self) -> None:
        raise TwoArguments(7, "out of range")

    @rpc
    def holds_a_lock(self) -> None:
        raise HoldsALock("locked")

    @rpc
    def local_class(self) -> None:
        class Local(Exception):
            pass

        raise Local("made here")

    @rpc
    def caused(self) -> None:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError("second") from first

    @rpc
    def returns_a_generator(self) -> Any:
        return (x for x in [1])

    @rpc
    def group(self) -> None:
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])

    @rpc
    def no_text(self) -> None:
        raise NoText

    @rpc
    def base_exception(self) -> None:
        raise Stop("stop")

    @rpc
    async def base_exception_async(self) -> None:
        raise Stop("stop")

    @rpc
    def interrupt(self) -> None:
        raise KeyboardInterrupt

    @rpc
    async def cancels_itself(self) -> None:
        raise asyncio.CancelledError

    @rpc
    def nested_timeout(self) -> None:
        self.inner.options(timeout_s=0.05).call("slow").result()

    @rpc
    async def slow(self) -> None:
        await asyncio.sleep(30)

    @rpc
    def echo(self, value: Any) -> Any:
        return value


@pytest.mark.case("O3")
@pytest.mark.parametrize(
    ("method", "type_name", "text", "cls"),
    [
        ("two_arguments", "TwoArguments", "out of range (7)", TwoArguments),
        ("holds_a_lock", "HoldsALock", "locked", ValueError),
        ("local_class", "Local", "made here", RemoteError),
        ("caused", "ValueError", "second", ValueError),
        ("returns_a_generator", "Unserializable", "generator", TypeError),
        ("group", "ExceptionGroup", "several", RemoteError),
        ("no_text", "NoText", "RuntimeError", RemoteError),
        ("base_exception", "Stop", "stop", RemoteError),
        ("base_exception_async", "Stop", "stop", RemoteError),
        ("interrupt", "KeyboardInterrupt", "", RemoteError),
    ],
)
def test_every_exception_arrives(
    mesh: Mesh, method: str, type_name: str, text: str, cls: type[Exception], own_time: OwnTime
) -> None:
    handle = mesh.serve("A", Member())[0]
    started = time.monotonic()
    with pytest.raises(cls) as caught:
        handle.call(method).result(HANG_S)
    assert own_time.since(started) < 1
    error: Any = caught.value
    assert isinstance(error, RemoteError)
    assert error.remote_type.rpartition(".")[2] == type_name
    assert text in str(error) and f"raised by A:0 in {method}()" in str(error)
    assert (error.role, error.rank, error.method, error.executed) == ("A", 0, method, "yes")
    told = error.remote_traceback + "".join(error.__notes__)
    if method != "returns_a_generator":
        assert "test_failures.py" in told and f"in {method}" in told, "file and line of the user's own code"
    if method == "caused":
        assert any("KeyError" in cause and "first" in cause for cause in error.remote_causes)
        assert "first" in told
    if method == "group":
        assert "ValueError: one" in told and "TypeError: two" in told
    assert handle.call("echo", 5).result() == 5, "the member goes on"


def test_a_method_that_cancels_itself_is_an_error(mesh: Mesh) -> None:
    handle = mesh.serve("A", Member())[0]
    with pytest.raises(RLMeshError, match=r"A:0\.cancels_itself\(\) was cancelled by its own code"):
        handle.call("cancels_itself").result(HANG_S)
    assert handle.call("echo", 5).result() == 5


def test_executed_is_about_the_call_that_was_made(mesh: Mesh) -> None:
    member = Member()
    handle = mesh.serve("A", member)[0]
    mesh.serve("B", Member())
    member.inner = mesh.runtimes[-2].peer("B:0", mesh.addresses[1].endpoint or "")
    with pytest.raises(CallTimeout, match=r"B:0\.slow\(\)") as caught:
        handle.call("nested_timeout").result(HANG_S)
    assert caught.value.executed == "yes", "the inner call may not have run; this one did"


SERVER = """
import asyncio, os, sys
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

class G:
    @rpc
    async def f(self): await asyncio.sleep(60)
    @rpc
    def echo(self, x): return x

with Runtime.start(name="G:2", key=bytes.fromhex(sys.argv[1]), bind=sys.argv[2]) as runtime:
    runtime.serve("G:2", G())
    print(runtime.endpoint, flush=True)
    sys.stdin.read()
"""


class Ranked:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @rpc
    async def f(self) -> int:
        if self.rank == 0:
            await asyncio.sleep(60)
        if self.rank == 2:
            await asyncio.sleep(0.2)
            raise ValueError("r2")
        return self.rank

    @rpc
    def echo(self, x: int) -> int:
        return x


@pytest.mark.case("O2")
def test_a_group_fails_as_fast_as_its_first_member(mesh: Mesh, own_time: OwnTime) -> None:
    group = mesh.serve("G", *[Ranked(rank) for rank in range(4)])
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"r2 \[raised by G:2 in f\(\)\]") as caught:
        group.call("f").result()
    assert time.monotonic() - started > 0.15 and own_time.since(started) < 1.2
    assert caught.value.rank == 2  # type: ignore[attr-defined]
    assert group[0].call("echo", 3).result() == 3
    outcomes = group.options(timeout_s=2, return_exceptions=True).call("f").result()
    assert isinstance(outcomes[0], CallTimeout) and outcomes[1] == 1 and outcomes[3] == 3
    assert isinstance(outcomes[2], ValueError)
    with pytest.raises(GroupCallError) as several:
        outcomes.raise_all()
    assert set(several.value.failures) == {0, 2} and several.value.results == {1: 1, 3: 3}


@pytest.fixture
def rank_2(mesh: Mesh) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, KEY.hex(), mesh.process_address()], stdout=subprocess.PIPE,
        stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    endpoint = process.stdout.readline().strip()
    group = mesh.serve("G", *[Ranked(rank) for rank in range(4)])
    mesh.addresses[2] = MemberAddress("G", 2, 0, endpoint, pid=process.pid)
    mesh.publish(MemberAddress("X", 0, 0, None))
    assert group.call("echo", 1).result() == [1] * 4
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)
        process.stdout.close()
        process.stdin.close()
        for leftover in Path(mesh.socket_dir).iterdir():
            if leftover.is_socket():
                leftover.unlink()


@pytest.mark.case("O2")
def test_a_group_fails_as_fast_as_a_member_dies(
    mesh: Mesh, rank_2: subprocess.Popen[str], until: Callable[..., None], own_time: OwnTime
) -> None:
    from rlmesh.runtime.group import RoleGroup

    group: RoleGroup[Any] = RoleGroup("G", runtime=mesh.caller)
    future = group.call("f")
    collected = group.options(timeout_s=2, return_exceptions=True).call("f")
    until(lambda: len(mesh.caller.activity.pending()) == 4)
    os.kill(rank_2.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    rank_2.wait(HANG_S)
    mesh.caller.member_lost(ExitInfo("G", 2, 0, rank_2.pid, None, 9, time.time(), hostname="h"))
    with pytest.raises(PeerLost, match=r"G:2 cannot answer f\(\): G rank 2 \(pid \d+ on h\) killed by SIGKILL") as lost:
        future.result()
    assert own_time.since(killed_at) < 1
    assert lost.value.rank == 2 and lost.value.executed == "maybe"
    assert group[0].call("echo", 3).result() == 3
    outcomes = collected.result()
    assert [type(outcome).__name__ for outcome in outcomes] == ["CallTimeout", "int", "PeerLost", "int"]
