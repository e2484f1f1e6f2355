"""Monarch: a mesh of processes of this host with an actor in each, and an actor of ``def`` methods in the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from rpc_peer import Body, seconds_of, seconds_of_blocking

monarch: Any = import_module("monarch.actor")
Actor: Any = monarch.Actor

STOCK_LOOP = True
ANSWER_LIMIT_S = 60.0

F = TypeVar("F", bound=Callable[..., Any])


def endpoint(method: F) -> F:
    """Monarch's decorator, typed."""
    made: F = monarch.endpoint(method)
    return made


class Member(Actor):  # type: ignore[misc]
    """Monarch takes ``async def`` or ``def`` methods in a class, not both."""

    def __init__(self) -> None:
        self._body = Body()

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def take(self, data: Any) -> Any:
        return self._body.take(data)

    @endpoint
    async def give(self, mib: int, stamp: int) -> Any:
        return self._body.give(mib, stamp)

    @endpoint
    async def pid(self) -> int:
        return self._body.pid()

    @endpoint
    async def collect(self) -> None:
        self._body.collect()

    @endpoint
    async def between(self, other: Any, calls: int) -> list[float]:
        return await seconds_of(other.echo.call_one, calls)


class DefMember(Actor):  # type: ignore[misc]
    @endpoint
    def echo_def(self, value: Any) -> Any:
        return value

    @endpoint
    def nap(self, seconds: float) -> None:
        Body().nap(seconds)


class Peer:
    def __init__(self, folder: Path) -> None:
        # By default the death of an actor ends the process that called it.
        monarch.unhandled_fault_hook = lambda failure: None

    async def start(self, members: int) -> None:
        self._processes = monarch.this_host().spawn_procs(per_host={"rank": members})
        self._mesh = self._processes.spawn("member", Member)
        self._members = [self._mesh.slice(rank=rank) for rank in range(members)]
        await self.group("pid")
        self._def_member = self._processes.slice(rank=0).spawn("def_member", DefMember)

    async def stop(self) -> None:
        await self._processes.stop()

    async def call(self, i: int, method: str, *args: Any) -> Any:
        return await getattr(self._on(i, method), method).call_one(*args)

    async def window(self, i: int, method: str, count: int) -> Sequence[Any]:
        call = getattr(self._on(i, method), method).call_one
        futures = [call(number) for number in range(count)]
        return [await future for future in futures]

    async def group(self, method: str, *args: Any) -> Sequence[Any]:
        return list((await getattr(self._mesh, method).call(*args)).values())

    async def between(self, calls: int) -> list[float]:
        times: list[float] = await self._members[0].between.call_one(self._members[1], calls)
        return times

    def from_thread(self, calls: int) -> list[float]:
        call = self._members[0].echo.call_one
        return seconds_of_blocking(lambda number: call(number).get(timeout=ANSWER_LIMIT_S), calls)

    def _on(self, i: int, method: str) -> Any:
        return self._def_member if method in ("echo_def", "nap") else self._members[i]
