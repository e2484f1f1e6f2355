"""A caller that ends, however it ends: what it asked for is ended too, and nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S
from tests.runtime.conftest import KEY, Mesh

CLIENT = """
import os, sys, time
from rlmesh.runtime.runtime import Runtime

runtime = Runtime.start(name="client", key=bytes.fromhex(sys.argv[1]), bind=False)
callee, user = (runtime.peer(name, endpoint) for name, endpoint in (("A:0", sys.argv[2]), ("B:0", sys.argv[3])))
assert callee.call("echo", 1).result() == 1
made = callee.call("make", 500_000)
size = user.call("size", made)
callee.call("go").result()
assert size.result() == 500_000
stream = callee.stream("items")
assert next(stream) == 0
calls = [callee.call("sleep"), callee.call("hold"), callee.call("note"), callee.call("note"), callee.call("nested")]
big = callee.call("echo", bytes(50_000_000))
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[4] == "exit":
    os._exit(5)
if sys.argv[4] == "leave":
    sys.exit()
time.sleep(60)
"""


class Member:
    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.noted = 0
        self.holding = threading.Event()
        self.release = threading.Event()
        self.passed_on = threading.Event()  # the future of `make`, by its caller
        self.inner: Any = None

    @rpc(concurrent=8)
    def echo(self, value: Any) -> Any:
        return value

    @rpc(concurrent=8)
    def make(self, n: int) -> bytes:
        self.passed_on.wait(HANG_S)
        return bytes(n)

    @rpc(concurrent=8)
    def go(self) -> None:
        self.passed_on.set()

    @rpc
    async def items(self) -> Any:
        try:
            for number in range(1_000_000):
                yield number
        finally:
            self.cancelled.append("items")

    @rpc
    async def sleep(self) -> None:
        await self.watched("sleep")

    @rpc
    async def nested(self) -> None:
        await self.inner.call("deep")

    @rpc
    def hold(self) -> None:
        self.holding.set()
        self.release.wait(HANG_S)

    @rpc
    def note(self) -> None:
        self.noted += 1

    async def watched(self, name: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


class User:
    def __init__(self, member: Member) -> None:
        self.member = member

    @rpc
    def size(self, data: bytes) -> int:
        return len(data)

    @rpc
    async def deep(self) -> None:
        await self.member.watched("deep")


@contextmanager
def client(mesh: Mesh, how: str) -> Iterator[subprocess.Popen[str]]:
    endpoints = [address.endpoint or "" for address in mesh.addresses]
    command = [sys.executable, "-X", "faulthandler", "-c", CLIENT, KEY.hex(), *endpoints, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)
        process.stdout.close()
        process.stdin.close()


def incoming(runtime: Runtime) -> int:
    return len(runtime._dispatcher._incoming)


@pytest.mark.parametrize("how", ["kill", "exit", "leave"])
def test_what_a_client_asked_for_ends_with_it(mesh: Mesh, until: Callable[..., None], how: str) -> None:
    member = Member()
    group = mesh.serve("A", member)
    mesh.serve("B", User(member))
    callee, user = mesh.runtimes[-2], mesh.runtimes[-1]
    member.inner = callee.peer("B:0", mesh.addresses[1].endpoint or "")
    with client(mesh, how) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        assert member.holding.wait(HANG_S)
        until(lambda: incoming(user) == 1 and incoming(callee) >= 6)
        assert len(callee.outbound.results) == 1
        if how == "kill":
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(HANG_S) == {"kill": -9, "exit": 5, "leave": 0}[how]
    until(lambda: sorted(member.cancelled) == ["deep", "items", "sleep"])
    until(lambda: incoming(callee) == incoming(user) == 0)
    until(lambda: len(callee.outbound.results) == 0)
    until(lambda: len(callee.inbound.channels) == 1)  # The user fetched from it, and lives.
    assert callee.activity.pending() == []
    member.release.set()
    assert group[0].call("echo", 3).result() == 3
    assert group[0].call("hold").result() is None, "the member's thread is free again"
    assert member.noted == 0, "calls that were queued must not start"
