"""Futures as arguments of further calls: who gets the bytes, what is kept where, and for how long."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import CallError, CallTimeout, PeerLost, Unserializable
from rlmesh.job.status import ExitInfo
from rlmesh.runtime.connections.address_book import MemberAddress
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.serving.result_store import KEEP_BYTES
from rlmesh.wire.envelope import Frames
from tests.own_time import HANG_S
from tests.runtime.conftest import KEY, Mesh

LARGE = 1_000_000


class Maker:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.go = threading.Event()

    @rpc
    def make(self, nbytes: int) -> bytes:
        self.go.wait(20)
        return bytes([self.rank]) * nbytes

    @rpc
    def array(self, n: int) -> Any:
        self.go.wait(20)
        return np.full(n, self.rank)

    @rpc
    def batch(self, items: list[int]) -> list[Any]:
        self.go.wait(20)
        return [np.full(5_000, item) for item in items]

    @rpc
    def short_batch(self, items: list[int]) -> list[Any]:
        self.go.wait(20)
        return [bytes(5_000) for _ in items[1:]]

    @rpc(concurrent=2)
    def has_read(self) -> None:
        """Return once all that was sent before is read. A producer that has not read yet that its result is passed on
        sends it to its caller."""

    @rpc
    def fail(self) -> None:
        self.go.wait(20)
        raise ValueError("nothing was made")

    @rpc
    def wait(self) -> None:
        self.go.wait(20)


class User:
    def __init__(self) -> None:
        self.order: list[str] = []

    @rpc
    def size(self, data: bytes, *, more: Any = None) -> int:
        self.order.append("size")
        return len(data) + len(more or ())

    @rpc
    async def size_async(self, data: bytes) -> int:
        return len(data)

    @rpc
    def deep(self, table: dict[str, list[Any]]) -> int:
        return sum(len(item) for items in table.values() for item in items)

    @rpc
    def firsts(self, items: list[Any]) -> list[int]:
        return [int(item[0]) for item in items]

    @rpc
    def shapes(self, arrays: list[Any]) -> list[int]:
        return [len(array) for array in arrays]

    @rpc
    def write(self, array: Any) -> float:
        array[:] = 7
        return float(array.sum())

    @rpc
    def note(self, what: Any) -> None:
        self.order.append(str(what)[:3])

    @rpc
    async def parts(self, data: bytes) -> AsyncIterator[int]:
        for start in range(0, len(data), 250_000):
            yield len(data[start : start + 250_000])

    @rpc
    def parts_in_thread(self, data: bytes) -> Iterator[int]:
        yield len(data)

    @rpc
    def seen(self) -> list[str]:
        return self.order


class Counter:
    """Bytes that a runtime gets, as a wrapper of what its transports call."""

    def __init__(self, runtime: Runtime) -> None:
        self.nbytes = 0
        take = runtime.inbound.on_packet

        def on_packet(link: Any, frames: Frames) -> None:
            self.nbytes += sum(memoryview(frame).nbytes for frame in frames)
            take(link, frames)

        runtime.inbound.on_packet = on_packet  # type: ignore[method-assign]


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted where all of them are seen."""
    monkeypatch.setattr("rlmesh.memory.exchange.MemoryExchange.capture", lambda self, items: [bytes(i) for i in items])


def kept(runtime: Runtime) -> int:
    return len(runtime.outbound.results)


def runtime_of(mesh: Mesh, name: str) -> Runtime:
    return next(runtime for runtime in mesh.runtimes if runtime.name == name)


def test_bytes_go_from_the_producer_to_the_consumer(mesh: Mesh, until: Callable[..., None]) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User())
    makers[0].call("wait").cancel()
    counter = Counter(mesh.caller)
    made = makers[0].call("make", LARGE)
    used = users[0].call("size", made)
    assert "waits for an argument, from MAKER:0.make() for" in used.waiting_for()
    makers[0].call("has_read").result()
    maker.go.set()
    assert used.result() == LARGE
    assert counter.nbytes < 10_000, "the result passed the caller"
    assert made.done() and kept(runtime_of(mesh, "MAKER:0")) == 1
    # The caller can have the value too, later.
    assert made.result() == bytes(LARGE)
    assert counter.nbytes > LARGE
    del made, used
    gc.collect()
    until(lambda: kept(runtime_of(mesh, "MAKER:0")) == 0)


def test_ordinary_results_and_small_ones_are_not_kept(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User())
    maker.go.set()
    assert len(makers[0].call("make", LARGE).result()) == LARGE
    assert kept(runtime_of(mesh, "MAKER:0")) == 0
    maker.go.clear()
    small = makers[0].call("make", KEEP_BYTES // 2)
    used = users[0].call("size", small)
    maker.go.set()
    assert used.result() == KEEP_BYTES // 2 and kept(runtime_of(mesh, "MAKER:0")) == 0
    done = makers[0].call("make", LARGE)
    done.result()
    assert users[0].call("size", done, more=done).result() == 2 * LARGE


def test_passed_futures_may_stand_anywhere_in_the_arguments(mesh: Mesh) -> None:
    members = [Maker(rank) for rank in range(2)]
    makers, users = mesh.serve("MAKER", *members), mesh.serve("USER", User())
    one, both = makers[0].call("make", LARGE), makers.call("make", 50_000)
    futures = [
        users[0].call("deep", {"a": [one, b"xyz"], "b": [one]}),
        users[0].call("size", one, more=[1, 2]),
        users[0].call("size_async", one),
        users[0].call("deep", {"both": both}),
        users.call("size", one),
    ]
    for member in members:
        member.go.set()
    assert [future.result() for future in futures] == [2 * LARGE + 3, LARGE + 2, LARGE, 100_000, [LARGE]]
    assert [len(value) for value in both.result()] == [50_000, 50_000]


@pytest.mark.parametrize(("world", "others"), [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_batches_are_split_where_they_are(mesh: Mesh, no_shared_memory: None, world: int, others: int) -> None:
    members = [Maker(rank) for rank in range(world)]
    makers, users = mesh.serve("MAKER", *members), mesh.serve("USER", *[User() for _ in range(others)])
    makers.call("batch", []).cancel()
    counters = [Counter(runtime_of(mesh, f"USER:{rank}")) for rank in range(others)]
    caller = Counter(mesh.caller)
    made = makers.call_batch("batch", 12, list(range(12)))
    used = users.call_batch("firsts", 12, made)
    assert not used.done()
    for rank, member in enumerate(members):
        makers[rank].call("has_read").result()
        member.go.set()
    assert list(used) == list(range(12))
    received = [counter.nbytes for counter in counters]
    assert users.call("shapes", made).result() == [[5_000] * 12] * others
    assert caller.nbytes < 30_000, "the batch passed the caller"
    if others > 1:
        assert max(received) < 12 * 40_000, "a member got more of the batch than its part"
    assert [int(item[0]) for item in made] == list(range(12))


def test_the_items_of_a_batch_that_is_not_there_yet_are_scattered(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User(), User())
    made = makers.call_batch("batch", 2, [3, 4])
    sizes = users.call("size", made, _scatter=True)
    maker.go.set()
    assert sizes.result() == [5_000, 5_000]


def test_a_batch_of_the_wrong_length_is_named(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User(), User())
    used = users.call_batch("firsts", 8, makers.call_batch("short_batch", 8, list(range(8))))
    maker.go.set()
    with pytest.raises(CallError, match=r"7 results for 8 items"):
        list(used)


def test_the_failure_of_a_producer_is_that_of_its_consumers(mesh: Mesh) -> None:
    maker, user = Maker(), User()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", user)
    used = users[0].call("size", makers[0].call("fail"))
    maker.go.set()
    with pytest.raises(ValueError, match=r"nothing was made \[raised by MAKER:0 in fail\(\)\]"):
        used.result()
    assert user.order == []


def test_streams_take_futures_as_arguments(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User())
    made = makers[0].call("make", LARGE)
    parts, whole = users[0].stream("parts", made), users.stream("parts_in_thread", made)
    maker.go.set()
    assert list(parts) == [250_000] * 4 and list(whole) == [LARGE]


def test_later_calls_to_the_same_member_do_not_overtake(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User(), User())
    users.call("seen").result()
    first = users[0].call("size", makers[0].call("make", LARGE))
    users[0].notify("note", "second")
    third = users[0].call("note", "third")
    assert users[1].call("seen").result() == [], "members that nothing waits for are not held up"
    time.sleep(0.05)
    assert not third.done()
    maker.go.set()
    first.result()
    third.result()
    assert users[0].call("seen").result() == ["size", "sec", "thi"]


def test_notifications_take_futures_as_arguments(mesh: Mesh, until: Callable[..., None]) -> None:
    maker, user = Maker(), User()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", user)
    users[0].notify("note", makers[0].call("make", LARGE))
    maker.go.set()
    until(lambda: user.order == ["b'\\"])
    until(lambda: kept(runtime_of(mesh, "MAKER:0")) == 0)


def test_deadline_and_cancellation_while_an_argument_is_awaited(mesh: Mesh, until: Callable[..., None]) -> None:
    maker, user = Maker(), User()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", user)
    made = makers[0].call("make", LARGE)
    late = users[0].options(timeout_s=0.2).call("size", made)
    cancelled = users[0].call("size", made)
    after = users[0].call("seen")
    assert cancelled.cancel()
    with pytest.raises(CallTimeout, match=r"an argument was not there: MAKER:0\.make\(\)") as caught:
        late.result()
    assert caught.value.executed == "no"
    assert after.result() == [], "calls behind those that ended go on"
    maker.go.set()
    assert len(made.result()) == LARGE
    until(lambda: mesh.caller.activity.pending() == [])


def test_results_are_copies_for_each_consumer(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User(), User())
    made = makers[0].call("array", 10_000)
    written = users.call("write", made)
    maker.go.set()
    assert written.result() == [70_000.0] * 2 and made.result().sum() == 0


def test_a_member_may_use_what_it_made_itself(mesh: Mesh) -> None:
    class Both(Maker, User):
        def __init__(self) -> None:
            Maker.__init__(self)
            User.__init__(self)

    both = Both()
    group = mesh.serve("BOTH", both)
    made = group[0].call("array", 100_000)
    written, length = group[0].call("write", made), group[0].call("size", made)
    both.go.set()
    assert written.result() == 700_000.0 and length.result() == 100_000 and made.result().sum() == 0


def test_a_cancelled_or_forgotten_future_is_released(mesh: Mesh, until: Callable[..., None]) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User())
    made = makers[0].call("make", LARGE)
    used = users[0].call("size", made)
    makers[0].call("has_read").result()
    maker.go.set()
    used.result()
    producer = runtime_of(mesh, "MAKER:0")
    assert kept(producer) == 1
    assert made.cancel() and made.cancelled()
    del used
    gc.collect()
    until(lambda: kept(producer) == 0)
    maker.go.clear()
    other = makers[0].call("make", LARGE)
    used = users[0].call("size", other)
    del other
    maker.go.set()
    assert used.result() == LARGE
    gc.collect()
    until(lambda: kept(producer) == 0)


def test_the_end_of_a_caller_releases_what_was_kept_for_it(mesh: Mesh, until: Callable[..., None]) -> None:
    maker = Maker()
    mesh.serve("MAKER", maker)
    mesh.serve("USER", User())
    caller = Runtime.start(name="second", key=KEY, bind=False)
    made = caller.peer("MAKER:0", mesh.addresses[0].endpoint or "").call("make", LARGE)
    used = caller.peer("USER:0", mesh.addresses[1].endpoint or "").call("size", made)
    caller.peer("MAKER:0", mesh.addresses[0].endpoint or "").call("has_read").result()
    maker.go.set()
    assert used.result() == LARGE and kept(runtime_of(mesh, "MAKER:0")) == 1
    caller.close()
    until(lambda: kept(runtime_of(mesh, "MAKER:0")) == 0)


def test_await_and_callbacks_bring_a_kept_value(mesh: Mesh) -> None:
    maker = Maker()
    makers, users = mesh.serve("MAKER", maker), mesh.serve("USER", User())
    made = makers[0].call("make", LARGE)
    arrived: list[int] = []
    made.add_done_callback(lambda future: arrived.append(len(future.result())))
    used = users[0].call("size", made)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, maker.go.set)
        assert len(await made) == LARGE and await used == LARGE

    asyncio.run(main())
    assert arrived == [LARGE]


def test_a_future_alone_cannot_be_pickled(mesh: Mesh) -> None:
    maker = Maker()
    made = mesh.serve("MAKER", maker)[0].call("make", 1)
    with pytest.raises(Unserializable, match="pass it as an argument of a call"):
        pickle.dumps(made)
    maker.go.set()


SERVER = """
import sys, threading
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

passed_on = threading.Event()

class Maker:
    @rpc(concurrent=2)
    def make(self, n):
        passed_on.wait(60)
        return bytes(n)
    @rpc(concurrent=2)
    def go(self):
        passed_on.set()

with Runtime.start(name="P:0", key=bytes.fromhex(sys.argv[1]), socket_dir=sys.argv[2]) as runtime:
    runtime.serve("P:0", Maker())
    print(runtime.endpoint, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def producer(mesh: Mesh) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, KEY.hex(), str(mesh.socket_dir)], stdout=subprocess.PIPE,
        stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    mesh.publish(MemberAddress("P", 0, 0, process.stdout.readline().strip(), pid=process.pid))
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)
        process.stdout.close()
        process.stdin.close()
        for leftover in Path(mesh.socket_dir).iterdir():
            if leftover.is_socket():
                leftover.unlink()


def test_the_death_of_a_producer_is_told_to_whoever_needs_its_result(
    mesh: Mesh, producer: subprocess.Popen[str], until: Callable[..., None]
) -> None:
    group: RoleGroup[Any] = RoleGroup("P", runtime=mesh.caller)
    user = User()
    users = mesh.serve("USER", user)
    mesh.publish()
    made = group[0].call("make", LARGE)
    used = users[0].call("size", made)
    group[0].call("go").result()
    assert used.result() == LARGE
    os.kill(producer.pid, signal.SIGKILL)
    producer.wait(HANG_S)
    lost = ExitInfo("P", 0, 0, producer.pid, None, 9, time.time(), hostname="h")
    for runtime in mesh.runtimes:
        runtime.member_lost(lost)
    with pytest.raises(PeerLost, match=r"the result of P:0\.make\(\).*could not be fetched.*") as caught:
        made.result(HANG_S)
    assert caught.value.executed == "yes" and caught.value.role == "P"
    again = users[0].call("size", made)
    with pytest.raises(PeerLost, match="could not be fetched"):
        again.result(HANG_S)
