"""Bare zmq.asyncio under uvloop with msgpack: what the sockets alone cost. One DEALER per member."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import uvloop
import zmq
import zmq.asyncio
from rpc_peer import Body, seconds_of, seconds_of_blocking

ANSWER_LIMIT_S = 60.0


class Client:
    """The caller's side of one member."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = _unbounded(context.socket(zmq.DEALER))
        self._socket.connect(address)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._reader = self._loop.create_task(self._read())

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        number = next(self._ids)
        future = self._waiting[number] = self._loop.create_future()
        if args and hasattr(args[0], "numpy"):
            frames = [msgpack.packb([number, method, []]), memoryview(args[0].numpy())]
        else:
            frames = [msgpack.packb([number, method, args])]
        self._socket.send_multipart(frames, copy=len(frames) == 1)
        return future

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            number, value = msgpack.unpackb(frames[0].buffer)
            self._waiting.pop(number).set_result(_tensor(frames[1]) if len(frames) > 1 else value)

    def close(self) -> None:
        self._reader.cancel()
        self._socket.close(0)


class Peer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = itertools.count()

    def own_rows(self) -> dict[str, Any]:
        return {"death": _unnoticed}

    async def start(self, members: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        start = next(self._starts)
        addresses = [f"ipc://{self._folder}/{start}-{rank}" for rank in range(members)]
        self._processes = [_start_member(address) for address in addresses]
        self._clients = [Client(self._context, address) for address in addresses]
        self._addresses = addresses
        await self.group("pid")

    async def stop(self) -> None:
        for client in self._clients:
            client.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._context.term()

    async def call(self, i: int, method: str, *args: Any) -> Any:
        return await self._clients[i].call(method, *args)

    async def window(self, i: int, method: str, count: int) -> Sequence[Any]:
        call = self._clients[i].call
        futures = [call(method, number) for number in range(count)]
        return [await future for future in futures]

    async def group(self, method: str, *args: Any) -> Sequence[Any]:
        futures = [client.call(method, *args) for client in self._clients]
        return [await future for future in futures]

    async def between(self, calls: int) -> list[float]:
        times: list[float] = await self.call(0, "between", self._addresses[1], calls)
        return times

    def from_thread(self, calls: int) -> list[float]:
        def call(number: int) -> Any:
            done = asyncio.run_coroutine_threadsafe(self.call(0, "echo", number), self._loop)
            return done.result(ANSWER_LIMIT_S)

        return seconds_of_blocking(call, calls)


def _start_member(address: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, address])


async def _unnoticed() -> dict[str, float]:
    raise TimeoutError("a bare socket notices nothing")


class Member(Body):
    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context

    async def between(self, address: str, calls: int) -> list[float]:
        client = Client(self._context, address)
        try:
            return await seconds_of(lambda number: client.call("echo", number), calls)
        finally:
            client.close()


async def serve(address: str) -> None:
    context = zmq.asyncio.Context()
    socket = _unbounded(context.socket(zmq.ROUTER))
    socket.bind(address)
    member = Member(context)
    while True:
        caller, head, *tail = await socket.recv_multipart(copy=False)
        number, method, args = msgpack.unpackb(head.buffer)
        value = getattr(member, method)(*([_tensor(tail[0])] if tail else args))
        if inspect.isawaitable(value):
            value = await value
        if hasattr(value, "numpy"):
            frames = [caller.bytes, msgpack.packb([number, None]), memoryview(value.numpy())]
            await socket.send_multipart(frames, copy=False)
        else:
            await socket.send_multipart([caller.bytes, msgpack.packb([number, value])])


def _unbounded(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _tensor(frame: zmq.Frame) -> Any:
    import torch

    return torch.frombuffer(frame.buffer, dtype=torch.float32)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
