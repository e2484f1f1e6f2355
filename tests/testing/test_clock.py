"""A loop in virtual time."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from rlmesh.runtime.process import clock
from rlmesh.testing import NothingLeft, VirtualLoop
from rlmesh.testing import clock as virtual
from tests.own_time import OwnTime


def test_hours_pass_in_no_time_and_in_order(own_time: OwnTime) -> None:
    began, real = time.monotonic(), clock.now
    seen: list[tuple[float, str]] = []

    async def nap(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        seen.append((clock.now() - 1000.0, name))

    async def main() -> None:
        await asyncio.gather(nap(7200, "c"), nap(0.001, "a"), nap(3600, "b"))

    with VirtualLoop() as loop:
        loop.run(main())
    assert [name for _, name in seen] == ["a", "b", "c"]
    assert [round(at, 3) for at, _ in seen] == [0.001, 3600, 7200]
    assert own_time.since(began) < 5
    assert clock.now is real, "the real clock is back"


def test_sockets_of_the_loop_work_in_virtual_time() -> None:
    async def main() -> bytes:
        left, right = socket.socketpair()
        with left, right:
            left.setblocking(False)
            right.setblocking(False)
            loop = asyncio.get_running_loop()
            loop.call_later(60, left.send, b"late")
            return await loop.sock_recv(right, 10)

    with VirtualLoop() as loop:
        assert loop.run(main()) == b"late"
        assert loop.time() == 1060.0


def test_a_wait_that_cannot_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "REAL_LIMIT_S", 0.05)

    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    with VirtualLoop() as loop, pytest.raises(NothingLeft, match="would wait for ever"):
        loop.run(wait_for_nothing())


def test_advance_runs_what_is_due() -> None:
    seen: list[int] = []
    with VirtualLoop() as loop:
        loop.call_later(1, seen.append, 1)
        loop.call_later(3, seen.append, 3)
        loop.advance(2)
        assert seen == [1]
        loop.advance(2)
        assert seen == [1, 3]
