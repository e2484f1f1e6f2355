"""Where the time of one call goes, step by step: python benchmarks/journey.py

A plain thread calls a ``def`` method of a member in another process, one call after the other; each step of
docs/journey-of-a-call.md is marked in both processes by the clock that they share. Medians, in microseconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from rlmesh import RoleGroup, Runtime, rpc
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.connections.inbound import Inbound
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.serving.dispatch import Dispatcher
from rlmesh.wire import codec

CALLS, WARM_UP = 1000, 200
KEY = b"journey-0123456789abcdef-journey"
stamps: list[tuple[str, int]] = []


def mark(owner: Any, name: str) -> None:
    """Note when a function begins and ends."""
    inner: Callable[..., Any] = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        stamps.append((f"{name}(", time.perf_counter_ns()))
        try:
            return inner(*args, **kwargs)
        finally:
            stamps.append((f"{name})", time.perf_counter_ns()))

    setattr(owner, name, marked)


class Member:
    @rpc
    def echo(self, number: int) -> int:
        stamps.append(("method", time.perf_counter_ns()))
        return number

    @rpc
    def take_stamps(self) -> list[tuple[str, int]]:
        taken = stamps.copy()
        stamps.clear()
        return taken


def stop_at_end_of_input(runtime: Runtime) -> None:
    sys.stdin.read()
    runtime.stop_main(now=True)


def serve(directory: str) -> None:
    for owner, name in ((Inbound, "on_packet"), (Dispatcher, "_execute"), (codec, "encode"), (Channel, "flush")):
        mark(owner, name)
    with Runtime.start(name="M:0", key=KEY, socket_dir=directory) as runtime:
        runtime.expect("M:0")
        runtime.serve("M:0", Member())
        print(runtime.endpoint, flush=True)
        threading.Thread(target=stop_at_end_of_input, args=(runtime,), daemon=True).start()
        runtime.run_main()


def first(taken: list[tuple[str, int]], name: str) -> int:
    return next(at for found, at in taken if found == name)


def steps(group: RoleGroup[Any]) -> dict[str, float]:
    """One call: step → microseconds."""
    stamps.clear()
    began = time.perf_counter_ns()
    group[0].call("echo", 1).result()
    ended = time.perf_counter_ns()
    here = stamps.copy()
    there = [(name, at) for name, at in group[0].call("take_stamps").result() if at >= began]
    at = [
        ("handle, submission, calls: options, deadline, table", began, first(here, "encode(")),
        ("codec.encode: arguments", first(here, "encode("), first(here, "encode)")),
        ("calls.start to channel.flush", first(here, "encode)"), first(here, "flush(")),
        ("pack, socket, the member's loop wakes", first(here, "flush("), first(there, "on_packet(")),
        ("unpack, dispatch.on_call, the main thread wakes", first(there, "on_packet("), first(there, "_execute(")),
        ("decode arguments, until the method begins", first(there, "_execute("), first(there, "method")),
        ("the method, codec.encode: its result", first(there, "method"), first(there, "encode)")),
        ("dispatch.finish to channel.flush", first(there, "encode)"), first(there, "flush(")),
        ("pack, socket, the caller's loop wakes", first(there, "flush("), first(here, "on_packet(")),
        ("unpack, calls.on_reply, decode", first(here, "on_packet("), first(here, "on_packet)")),
    ]  # fmt: skip
    found = {name: (end - start) / 1e3 for name, start, end in at}
    found["the waiting thread wakes"] = (ended - began) / 1e3 - sum(found.values())
    found["in all"] = (ended - began) / 1e3
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        command = [sys.executable, __file__, directory]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
            Runtime.start(name="caller", key=KEY, bind=False, network=NetworkOptions(busy_poll_s=0)) as runtime,
        ):
            assert process.stdin is not None and process.stdout is not None
            address = MemberAddress("M", 0, 0, process.stdout.readline().strip())
            runtime.set_address_book(AddressBook(1, (address,)))
            runtime.peer("M:0", address.endpoint or "").call("take_stamps").result()
            group: RoleGroup[Any] = RoleGroup("M", runtime=runtime)
            for owner, name in ((Inbound, "on_packet"), (codec, "encode"), (Channel, "flush")):
                mark(owner, name)
            runs = [steps(group) for _ in range(WARM_UP + CALLS)][WARM_UP:]
            process.stdin.close()
    for name in runs[0]:
        print(f"{statistics.median(run[name] for run in runs):8.1f}  {name}")


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()
