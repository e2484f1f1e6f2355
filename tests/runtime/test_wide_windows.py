"""As many calls are on their way to a method as it declares to run at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh

pytestmark = pytest.mark.case("s03")

MANY = 4000


class Meeting:
    """Nobody leaves before all are there."""

    def __init__(self) -> None:
        self.there = 0
        self.all_there = asyncio.Event()

    @rpc(concurrent=8192)
    async def come(self, number: int) -> int:
        self.there += 1
        if self.there == MANY:
            self.all_there.set()
        await self.all_there.wait()
        return number


def test_calls_from_a_plain_thread_are_all_on_their_way_at_once(mesh: Mesh) -> None:
    handle = mesh.serve("A", Meeting())[0].options(timeout_s=HANG_S)
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.extend(handle.call("come", number) for number in range(MANY)))
    thread.start()
    thread.join(HANG_S)
    assert [future.result() for future in made] == list(range(MANY))


def test_calls_from_a_loop_are_all_on_their_way_at_once(mesh: Mesh) -> None:
    handle = mesh.serve("A", Meeting())[0].options(timeout_s=HANG_S)

    async def all_at_once() -> list[int]:
        return list(await asyncio.gather(*(handle.call("come", number) for number in range(MANY))))

    assert asyncio.run(all_at_once()) == list(range(MANY))


def test_calls_of_several_callers_are_all_on_their_way_at_once(mesh: Mesh) -> None:
    mesh.serve("A", Meeting())
    callers = [mesh.start(f"C:{number}") for number in range(3)]
    mesh.publish()
    address = mesh.addresses[0].endpoint
    assert address is not None
    share = -(-MANY // 3)
    futures = []
    for number, caller in enumerate(callers):
        handle = caller.peer("A:0", address).options(timeout_s=HANG_S)

        async def some(handle: Any = handle, number: int = number) -> list[Any]:
            return [handle.call("come", n) for n in range(number * share, min(MANY, (number + 1) * share))]

        futures += asyncio.run(some())
    assert [future.result() for future in futures] == list(range(MANY))
