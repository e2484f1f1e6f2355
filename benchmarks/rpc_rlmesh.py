"""rlmesh: an embedded runtime on the caller's loop; members are processes of their own, and for some rows a job's.

As a program (``python rpc_rlmesh.py RANK FOLDER``) it is a member: reads the key from its standard input, prints
its endpoint, reads everybody's endpoints, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rpc_peer import Body, seconds_of, seconds_of_blocking

from rlmesh import RoleGroup, Runtime, rpc
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.default_runtime import set_default_runtime

ROLE = "MEMBER"
OF_JOBS = ("echo_service", "echo_joined", "echo_trainer", "members_8", "death")
"""Rows of a job that a program of its own runs: `rpc_job`."""
JOB_LIMIT_S = 60.0
END_LIMIT_S = 10.0


class Member(Body):
    echo = rpc("echo")(Body.echo)
    echo_def = rpc("echo_def")(Body.echo_def)
    take = rpc("take")(Body.take)
    give = rpc("give")(Body.give)
    pid = rpc("pid")(Body.pid)
    collect = rpc("collect")(Body.collect)
    nap = rpc("nap")(Body.nap)

    @rpc
    async def between(self, calls: int) -> list[float]:
        other = RoleGroup(ROLE)[1]
        return await seconds_of(lambda number: other.call("echo", number), calls)


class Peer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def own_rows(self) -> dict[str, Callable[[], Awaitable[dict[str, float]]]]:
        return {row: partial(self._of_job, row) for row in OF_JOBS}

    async def _of_job(self, row: str) -> dict[str, float]:
        """A figure of a job that is submitted by a program of its own."""
        script = Path(__file__).with_name("rpc_job.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), row, str(self._folder), stdout=subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), JOB_LIMIT_S)
        if process.returncode != 0:
            raise RuntimeError(f"the job of {script.name} failed with code {process.returncode}")
        figures: dict[str, float] = json.loads(output)
        return figures

    async def start(self, members: int) -> None:
        self._key = secrets.token_bytes(32)
        self._processes = [self._start_member(rank) for rank in range(members)]
        endpoints = [await asyncio.to_thread(_line_of, process) for process in self._processes]
        for process in self._processes:
            _tell(process, json.dumps(endpoints))
        self._endpoints = endpoints
        self._stack = AsyncExitStack()
        runtime = await self._stack.enter_async_context(Runtime.open(name="caller", key=self._key, bind=False))
        runtime.set_address_book(_book(endpoints))
        self._group: RoleGroup[Member] = RoleGroup(ROLE, runtime=runtime)
        self._members = list(self._group)
        await self.group("pid")

    def _start_member(self, rank: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, str(rank), str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        _tell(process, self._key.hex())
        return process

    async def stop(self) -> None:
        await self._stack.aclose()
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        for process in self._processes:
            await asyncio.to_thread(process.wait, END_LIMIT_S)

    async def call(self, i: int, method: str, *args: Any) -> Any:
        return await self._members[i].call(method, *args)

    async def window(self, i: int, method: str, count: int) -> Sequence[Any]:
        call = self._members[i].call
        futures = [call(method, number) for number in range(count)]
        return [await future for future in futures]

    async def group(self, method: str, *args: Any) -> Sequence[Any]:
        return await self._group.call(method, *args)

    async def between(self, calls: int) -> list[float]:
        times: list[float] = await self._members[0].call("between", calls)
        return times

    def from_thread(self, calls: int) -> list[float]:
        with Runtime.start(name="thread", key=self._key, bind=False) as runtime:
            member = runtime.peer(f"{ROLE}:0", self._endpoints[0])
            return seconds_of_blocking(lambda number: member.call("echo", number).result(), calls)


def _book(endpoints: Sequence[str]) -> AddressBook:
    members = (MemberAddress(ROLE, rank, 0, endpoint) for rank, endpoint in enumerate(endpoints))
    return AddressBook(1, tuple(members))


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a member ended before it was up, with code {process.wait(END_LIMIT_S)}")
    return line


def serve(rank: int, folder: str) -> None:
    key = bytes.fromhex(sys.stdin.readline())
    name = f"{ROLE}:{rank}"
    with Runtime.start(name=name, key=key, socket_dir=folder) as runtime:
        runtime.expect(name)
        print(runtime.endpoint, flush=True)
        runtime.set_address_book(_book(json.loads(sys.stdin.readline())))
        set_default_runtime(runtime)
        runtime.serve(name, Member())
        threading.Thread(target=_stop_at_end_of_input, args=(runtime,), daemon=True).start()
        runtime.run_main()


def _stop_at_end_of_input(runtime: Runtime) -> None:
    sys.stdin.read()
    runtime.stop_main(now=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
