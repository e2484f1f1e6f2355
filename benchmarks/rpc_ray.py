"""Ray: async actors for ``async def``, threaded ones for ``def``, ``ray.put`` for what goes to all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rpc_peer import Body, seconds_of, seconds_of_blocking

ray: Any = import_module("ray")


class Member(Body):
    """An async actor: one of its methods is ``async def``."""

    async def between(self, other: Any, calls: int) -> list[float]:
        return await seconds_of(other.echo.remote, calls)


class DefMember:
    """An actor whose methods run on its main thread."""

    def echo_def(self, value: Any) -> Any:
        return value


class Peer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._def_member: Any = None

    async def start(self, members: int) -> None:
        if not ray.is_initialized():
            ray.init(
                num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30,
                logging_level="error", _temp_dir=str(self._folder),
            )  # fmt: skip
        remote = ray.remote(Member).options(num_cpus=0)
        self._members = [remote.remote() for _ in range(members)]
        await self.group("pid")

    async def stop(self) -> None:
        for member in self._members:
            ray.kill(member)
        if self._def_member is not None:
            ray.kill(self._def_member)
            self._def_member = None

    async def call(self, i: int, method: str, *args: Any) -> Any:
        return await getattr(self._on(i, method), method).remote(*args)

    async def window(self, i: int, method: str, count: int) -> Sequence[Any]:
        call = getattr(self._on(i, method), method).remote
        return await asyncio.gather(*[call(number) for number in range(count)])

    async def group(self, method: str, *args: Any) -> Sequence[Any]:
        if args and hasattr(args[0], "numpy"):
            args = (ray.put(args[0]),)
        return await asyncio.gather(*[getattr(member, method).remote(*args) for member in self._members])

    async def between(self, calls: int) -> list[float]:
        times: list[float] = await self._members[0].between.remote(self._members[1], calls)
        return times

    def from_thread(self, calls: int) -> list[float]:
        call = self._members[0].echo.remote
        return seconds_of_blocking(lambda number: ray.get(call(number)), calls)

    def _on(self, i: int, method: str) -> Any:
        if method != "echo_def" or len(self._members) > 1:
            return self._members[i]
        if self._def_member is None:
            self._def_member = ray.remote(DefMember).options(num_cpus=0).remote()
        return self._def_member
