"""xoscar: a pool with a process per member, the caller in its main process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rpc_peer import Body, seconds_of, seconds_of_blocking

xo: Any = import_module("xoscar")
ProcessIndex: Any = import_module("xoscar.backends.allocate_strategy").ProcessIndex
Actor: Any = xo.Actor

ANSWER_LIMIT_S = 60.0


class Member(Actor, Body):  # type: ignore[misc]
    async def between(self, address: str, uid: str, calls: int) -> list[float]:
        other = await xo.actor_ref(address=address, uid=uid)
        return await seconds_of(other.echo, calls)


class Peer:
    def __init__(self, folder: Path) -> None:
        pass

    async def start(self, members: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = await xo.create_actor_pool("127.0.0.1:0", n_process=members, auto_recover=False)
        address = self._pool.external_address
        self._members = [
            await xo.create_actor(Member, address=address, uid=f"{i}", allocate_strategy=ProcessIndex(1 + i))
            for i in range(members)
        ]
        await self.group("pid")

    async def stop(self) -> None:
        await self._pool.stop()

    async def call(self, i: int, method: str, *args: Any) -> Any:
        return await getattr(self._members[i], method)(*args)

    async def window(self, i: int, method: str, count: int) -> Sequence[Any]:
        call = getattr(self._members[i], method)
        return await asyncio.gather(*[call(number) for number in range(count)])

    async def group(self, method: str, *args: Any) -> Sequence[Any]:
        return await asyncio.gather(*[getattr(member, method)(*args) for member in self._members])

    async def between(self, calls: int) -> list[float]:
        other = self._members[1]
        times: list[float] = await self._members[0].between(other.address, other.uid.decode(), calls)
        return times

    def from_thread(self, calls: int) -> list[float]:
        def call(number: int) -> Any:
            done = asyncio.run_coroutine_threadsafe(self.call(0, "echo", number), self._loop)
            return done.result(ANSWER_LIMIT_S)

        return seconds_of_blocking(call, calls)
