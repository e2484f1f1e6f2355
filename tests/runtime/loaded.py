"""Two processes for the tests of load: ``server`` answers, ``client`` calls and prints what it measured as JSON.

``python -m tests.runtime.loaded server KEY_HEX SOCKET_DIR`` and ``… client KEY_HEX ENDPOINT WHAT``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

MIB = 1 << 20
WARM_UP, CALLS, WINDOW, BURST = 5_000, 50_000, 500, 20_000
ARRAY_BYTES = 512 * MIB


def memory_mib() -> tuple[float, float]:
    """Resident memory of this process now, after a collection, and at its peak."""
    gc.collect()
    with open("/proc/self/status") as file:
        table = dict(line.split(":", 1) for line in file)
    return int(table["VmRSS"].split()[0]) / 1024, int(table["VmHWM"].split()[0]) / 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Server:
    @rpc
    async def nothing(self, number: int) -> int:
        return number

    @rpc
    async def memory(self) -> tuple[float, float]:
        return memory_mib()

    @rpc
    async def forget_peak(self) -> None:
        forget_peak()

    @rpc
    async def resources(self) -> tuple[int, int]:
        """Tasks of its loop but this one, and open descriptors."""
        return len(asyncio.all_tasks()) - 1, len(os.listdir("/proc/self/fd"))

    @rpc
    def mirror(self, array: Any) -> Any:
        return array

    @rpc
    async def ping(self) -> None: ...


async def many_calls(runtime: Runtime, server: MemberHandle) -> dict[str, Any]:
    """50,000 calls in a window of 500, then 20,000 at once."""
    in_flight = 0

    async def windowed(total: int) -> int:
        answers = 0
        for start in range(0, total, WINDOW):
            numbers = range(start, start + WINDOW)
            futures = [server.call("nothing", number) for number in numbers]
            answers += sum([await future == number for future, number in zip(futures, numbers, strict=True)])
        return answers

    await windowed(WARM_UP)
    await server.call("forget_peak")
    forget_peak()
    before = memory_mib(), await server.call("memory"), await server.call("resources")
    answers = await windowed(CALLS)
    futures = [server.call("nothing", number) for number in range(BURST)]
    peer = next(iter(runtime.outbound.peers.by_endpoint.values()))
    while not all(future.done() for future in futures):
        in_flight = max(in_flight, len(peer.pending))
        await asyncio.sleep(0.001)
    burst = sum(future.result() == number for number, future in enumerate(futures))
    del futures
    return {
        "answers": answers,
        "burst": burst,
        "in_flight": in_flight,
        "client": [before[0], memory_mib()],
        "server": [before[1], await server.call("memory")],
        "resources": [before[2], await server.call("resources")],
    }


def big_payload(runtime: Runtime, server: MemberHandle, pinger: MemberHandle) -> dict[str, Any]:
    """512 MiB go there and back while another caller pings the same member every 100 ms."""
    array = np.arange(ARRAY_BYTES // 4, dtype=np.float32)
    expected = float(array.sum(dtype=np.float64))
    pinger.call("ping").result()
    server.call("forget_peak").result()
    forget_peak()
    before = memory_mib()[0], server.call("memory").result()[0]
    pings: list[float] = []
    peaks: list[tuple[float, float]] = []
    over = threading.Event()

    def ping() -> None:
        while not over.wait(0.1):
            began = time.monotonic()
            pinger.call("ping").result()
            pings.append(time.monotonic() - began)

    thread = threading.Thread(target=ping)
    thread.start()
    equal, took_s = False, 0.0
    try:
        for _ in range(3):
            began = time.monotonic()
            back = server.call("mirror", array).result()
            took_s = time.monotonic() - began
            equal = float(back.sum(dtype=np.float64)) == expected and back.shape == array.shape
            peaks.append((memory_mib()[1] - before[0], server.call("memory").result()[1] - before[1]))
            del back
    finally:
        over.set()
        thread.join()
    return {"equal": equal, "took_s": took_s, "pings": sorted(pings), "extra_mib": peaks}


def serve(key: bytes, socket_dir: str) -> None:
    with Runtime.start(name="S:0", key=key, socket_dir=socket_dir) as runtime:
        runtime.serve("S:0", Server())
        print(runtime.endpoint, flush=True)
        sys.stdin.read()


async def call_many(key: bytes, endpoint: str) -> dict[str, Any]:
    async with Runtime.open(name="client", key=key, bind=False) as runtime:
        return await many_calls(runtime, runtime.peer("S:0", endpoint))


def main() -> None:
    what, key, where = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3]
    if what == "server":
        serve(key, where)
    elif sys.argv[4] == "many":
        print(json.dumps(asyncio.run(call_many(key, where))))
    else:
        with Runtime.start(name="client", key=key, bind=False) as runtime, Runtime.start(key=key, bind=False) as other:
            print(json.dumps(big_payload(runtime, runtime.peer("S:0", where), other.peer("S:0", where))))


if __name__ == "__main__":
    main()
