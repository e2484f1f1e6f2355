"""A job whose elastic role loses a rank shortly before each call to it; its trainer writes down what the calls gave.

The two ranks add their numbers over a connection of their own, as a collective does: a rank that runs alone waits for
the next call of the other one, and from then on they pair off by one. A rank that sees numbers of two calls meet writes
that down.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError

CALL_S = 30.0
"""A call that takes longer is one that waits for a rank which does not come."""


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


class Rank:
    """One of two."""

    def setup(self) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.notes: list[tuple[int, int]] = []
        if current_worker().rank == 0:
            with socket.create_server(address, reuse_port=False) as server:
                server.settimeout(CALL_S)
                self.other, _ = server.accept()
            return
        for _ in range(int(CALL_S / 0.005)):
            try:
                self.other = socket.create_connection(address)
                return
            except OSError:
                time.sleep(0.005)
        raise ConnectionError("rank 0 does not listen")

    def add(self, call: int, number: int) -> int:
        """The sum of both ranks' numbers."""
        self.other.sendall(struct.pack("qq", call, number))
        answer = b""
        while len(answer) < 16:
            more = self.other.recv(16 - len(answer))
            if not more:
                raise ConnectionError("the other rank is gone")
            answer += more
        met, theirs = struct.unpack("qq", answer)
        if met != call:
            worker = current_worker()
            with (worker.run_dir / "torn.txt").open("a") as torn:
                torn.write(f"rank {worker.rank}.{worker.incarnation}: call {call} met call {met}\n")
        return number + int(theirs)

    @rpc
    def update(self, call: int, number: int) -> int:
        return self.add(call, number)

    @rpc
    def update_all(self, items: list[int]) -> list[int]:
        total = self.add(items[0] // 10, sum(items))
        return [total] * len(items)

    @rpc
    def updates(self, call: int, count: int) -> Iterator[int]:
        for step in range(count):
            yield self.add(call, step)

    @rpc
    def note(self, call: int, number: int) -> None:
        self.notes.append((call, self.add(call, number)))

    @rpc
    def noted(self) -> list[tuple[int, int]]:
        notes, self.notes = self.notes, []
        return notes

    @rpc
    def pid(self) -> int:
        return os.getpid()


class Helper:
    @rpc
    async def echo(self, value: Any) -> Any:
        return value


class Trainer:
    def run(self) -> None:
        self.group = RoleGroup("RANK").options(timeout_s=CALL_S)
        self.helper = RoleGroup("HELPER")
        self.calls = 0
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        draw = random.Random(config()["seed"])
        ways = [getattr(self, way) for way in config()["ways"]]
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            for _ in range(config()["moments"]):
                self.moment(draw, draw.choice(ways))
        except AssertionError as error:
            self.wrong.append(str(error))
        finally:
            busy.kill()
            busy.wait()
            torn = current_worker().run_dir / "torn.txt"
            met = torn.read_text().splitlines() if torn.exists() else []
            result = {"seen": dict(self.seen), "wrong": self.wrong, "met": met}
            Path(config()["out"]).write_text(json.dumps(result))

    def moment(self, draw: random.Random, way: Callable[[int], None]) -> None:
        """Kill a rank, wait a little, call the group, and see whether the ranks are in step afterwards."""
        pids = self.until_it_works(lambda: self.group.call("pid").result())
        rank, wait_s = draw.randrange(2), draw.uniform(0.0, draw.choice((0.04, 0.2)))
        os.kill(pids[rank], signal.SIGKILL)
        end = time.perf_counter() + wait_s
        while time.perf_counter() < end - 0.001:
            time.sleep(0.0005)
        name = way.__name__
        try:
            way(self.next())
            self.seen[f"{name} right"] += 1
        except AssertionError as error:
            self.wrong.append(f"{name} {wait_s * 1000:.1f} ms after the death of rank {rank}: {error}")
        except (CallError, ConnectionError) as error:
            self.seen[f"{name} {type(error).__name__}"] += 1
        try:
            self.until_it_works(self.in_step)
        except AssertionError as error:
            self.wrong.append(f"after {name} {wait_s * 1000:.1f} ms after the death of rank {rank}: {error}")

    def until_it_works(self, call: Callable[[], Any]) -> Any:
        end = time.monotonic() + 2 * CALL_S
        while True:
            try:
                return call()
            except (CallError, ConnectionError) as error:
                if "CallTimeout" in type(error).__name__ or time.monotonic() > end:
                    raise AssertionError(f"it does not come back: {error}") from error
                time.sleep(0.002)

    def next(self) -> int:
        self.calls += 1
        return self.calls

    def in_step(self) -> None:
        call = self.next()
        same(self.group.call("update", call, call).result(), [2 * call, 2 * call])
        for notes in self.group.call("noted").result():
            for noted, total in notes:
                same(total, 2 * noted)

    # What is called.

    def call(self, call: int) -> None:
        same(self.group.call("update", call, call).result(), [2 * call, 2 * call])

    def slice(self, call: int) -> None:
        same(self.group[0:2].call("update", call, call).result(), [2 * call, 2 * call])

    def scatter(self, call: int) -> None:
        futures = self.group.call("update", [call, call], [call, 3 * call], _scatter=True)
        same(futures.result(), [4 * call, 4 * call])

    def batch(self, call: int) -> None:
        items = [call * 10 + position for position in range(4)]
        same(list(self.group.call_batch("update_all", 4, items)), [sum(items)] * 4)

    def idempotent(self, call: int) -> None:
        same(self.group.options(idempotent=True).call("update", call, call).result(), [2 * call, 2 * call])

    def outcomes(self, call: int) -> None:
        results = self.group.options(return_exceptions=True).call("update", call, call).result()
        for result in results:
            if not isinstance(result, Exception):
                same(result, 2 * call)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def hasty(self, call: int) -> None:
        same(self.group.options(queue=False).call("update", call, call).result(), [2 * call, 2 * call])

    def stream(self, call: int) -> None:
        items = list(self.group.stream("updates", call, 3))
        same(sorted(items), [0, 0, 2, 2, 4, 4])

    def notify(self, call: int) -> None:
        self.group.notify("note", call, call)
        for notes in self.group.call("noted").result():
            for noted, total in notes:
                same(total, 2 * noted)

    def passed(self, call: int) -> None:
        number = self.helper.call_any("echo", call)
        same(self.group.call("update", call, number).result(), [2 * call, 2 * call])

    def loop(self, call: int) -> None:
        futures = [rank.call("update", call, call) for rank in self.group]
        same([future.result() for future in futures], [2 * call, 2 * call])

    def pipelined(self, call: int) -> None:
        calls = [call, self.next(), self.next()]
        futures = [self.group.call("update", one, one) for one in calls]
        failed: Exception | None = None
        for one, future in zip(calls, futures, strict=True):
            try:
                same(future.result(), [2 * one, 2 * one])
            except (CallError, ConnectionError) as error:
                failed = failed or error
        if failed is not None:
            raise failed


WAYS = (
    "call", "slice", "scatter", "batch", "idempotent", "outcomes", "hasty", "stream", "notify", "passed", "pipelined",
    "loop",
)  # fmt: skip


def same(got: Any, wanted: Any) -> None:
    assert got == wanted, f"{got}, not {wanted}"


def build(out: Path, moments: int, seed: int, ways: tuple[str, ...] = WAYS) -> DLJob:
    values = {"out": str(out), "moments": moments, "seed": seed, "ways": ways}
    builder = DLJobBuilder().config(values).device_type("CPU").with_restart(max_restarts=10 * moments, delay_s=0)
    builder.role("RANK").train(Rank).nnodes(1).nproc_per_node(2).resource(cpu=0)
    builder.role("HELPER").run(Helper).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
