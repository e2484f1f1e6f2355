"""Large payloads take a connection of their own: small calls are not stuck behind them, and order is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.errors import MalformedFrame, PeerLost
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.connections.bulk_channel import BulkReceiver
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.connections.network import NetworkOptions, plain
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.testing import FaultPlan, LoopbackNetwork, VirtualLoop, faulty
from rlmesh.wire.envelope import Bulk, BulkPart, Call, Cancel, Detached, Frames, Header, Reply, detach
from tests.own_time import OwnTime
from tests.runtime.conftest import KEY

MIB = 1 << 20


class Member:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @rpc
    def keep(self, label: int, data: Any = b"") -> int:
        self.seen.append(label)
        return len(data)

    @rpc
    async def echo(self, data: Any) -> Any:
        return data

    @rpc
    async def ping(self) -> None:
        pass

    @rpc
    async def numbers(self, sizes: list[int]) -> AsyncIterator[Any]:
        for size in sizes:
            yield np.full(size, size % 251, np.uint8)


def over_tcp(**options: Any) -> NetworkOptions:
    """Without shared memory, as between two nodes."""
    return NetworkOptions(share_memory=False, **options)


class Tcp:
    """A member and a caller over TCP."""

    def __init__(self, options: NetworkOptions) -> None:
        self.member = Member()
        self.server = Runtime.start(name="A:0", key=KEY, bind="tcp://127.0.0.1:*", network=options)
        self.server.serve("A:0", self.member)
        self.caller = Runtime.start(name="caller", key=KEY, bind=False, network=options)
        self.handle: MemberHandle[Any] = self.caller.peer("A:0", self.server.endpoint or "").options(timeout_s=60)

    def close(self) -> None:
        self.caller.close()
        self.server.close()


@pytest.fixture(params=["encrypted", "private"])
def tcp(request: pytest.FixtureRequest) -> Iterator[Tcp]:
    made = Tcp(over_tcp(private=request.param == "private"))
    try:
        yield made
    finally:
        made.close()


def test_large_arguments_and_results_are_what_they_were(tcp: Tcp) -> None:
    # A result first: the side that was called asks for the lane.
    for size in (5, 3 * MIB + 1):
        streamed = [len(item) for item in tcp.handle.stream("numbers", [size, 10, 2 * MIB, 0, size])]
        assert streamed == [size, 10, 2 * MIB, 0, size]
    ones = np.ones(2 * MIB, np.int8)
    data: dict[str, Any] = {"a": np.arange(3 * MIB, dtype=np.float32), "b": b"x" * 100, "c": np.zeros(0), "d": [ones]}
    back = tcp.handle.call("echo", data).result()
    assert back.keys() == data.keys() and back["b"] == data["b"]
    assert np.array_equal(back["a"], data["a"]) and np.array_equal(back["d"][0], data["d"][0])
    back["a"][0] = 7  # It belongs to whoever received it.


def test_calls_for_one_place_start_in_the_order_they_were_made(tcp: Tcp) -> None:
    large = np.zeros(4 * MIB, np.uint8)
    futures = [tcp.handle.call("keep", n, large if n % 3 == 0 else b"") for n in range(30)]
    assert [future.result() for future in futures] == [4 * MIB if n % 3 == 0 else 0 for n in range(30)]
    assert tcp.member.seen == list(range(30))


def test_small_calls_are_not_stuck_behind_large_ones(tcp: Tcp, own_time: OwnTime) -> None:
    large = np.zeros(512 * MIB, np.uint8)
    tcp.handle.call("ping").result()
    waits: list[float] = []
    done = threading.Event()

    def ping() -> None:
        while not done.is_set():
            began = time.monotonic()
            tcp.handle.call("ping").result()
            waits.append(time.monotonic() - began)
            done.wait(0.01)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        began = time.monotonic()
        assert tcp.handle.call("keep", 0, large).result() == 512 * MIB
        took_s = time.monotonic() - began
    finally:
        done.set()
        thread.join(30)
    waits.sort()
    median_s, p99_s = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    print(f"512 MiB: {took_s:.2f} s; {len(waits)} pings: {median_s:.4f} s, p99 {p99_s:.4f}, worst {waits[-1]:.4f} s")
    # On one connection the worst waits for nearly all of the transfer. Other programs on the machine make p99 noisy.
    assert len(waits) >= 3 and own_time.of(median_s) < 0.1 and own_time.of(waits[-1]) < took_s / 2


def test_the_plain_port_takes_nothing_but_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)  # Nobody dies, so no news of a death is waited for.
    made = Tcp(over_tcp(private=True))
    try:
        made.handle.call("echo", np.zeros(2 * MIB, np.uint8)).result()
        port = made.server._transports.by_scheme["plain"]._listener.getsockname()[1]  # type: ignore[attr-defined]
        options = NetworkOptions(transports={"plain": plain})
        with Runtime.start(name="caller", key=KEY, bind=False, network=options) as other:
            future = other.peer("A:0", f"plain://127.0.0.1:{port}").options(timeout_s=10).call("ping")
            with pytest.raises(PeerLost):
                future.result()
        made.handle.call("ping").result()
    finally:
        made.close()


# Without sockets, in virtual time.


async def loopback(stack: AsyncExitStack, plan: FaultPlan, member: Member) -> tuple[Any, Any]:
    network = LoopbackNetwork()
    options = NetworkOptions(
        bulk_bytes=1000, bulk_schemes=frozenset({"loop"}), share_memory=False,
        transports={"loop": faulty(network.transports["loop"], plan)},
    )  # fmt: skip
    server = await stack.enter_async_context(Runtime.open(name="A:0", key=KEY, bind="loop://a", network=options))
    server.serve("A:0", member)
    caller = await stack.enter_async_context(Runtime.open(name="caller", key=KEY, bind=False, network=options))
    return caller.peer("A:0", "loop://a").options(timeout_s=20), server


def test_order_holds_whichever_connection_is_slower() -> None:
    class Async(Member):
        @rpc
        async def note(self, label: int, data: bytes) -> int:
            self.seen.append(label)
            return label

    async def main(seed: int) -> list[int]:
        member = Async()
        async with AsyncExitStack() as stack:
            handle, _ = await loopback(stack, FaultPlan(seed=seed, delay_s=(0.0, 1.0)), member)
            futures = [handle.call("note", n, bytes(2000 if n % 2 else 10)) for n in range(20)]
            assert await asyncio.gather(*futures) == list(range(20))
        return member.seen

    for seed in range(5):
        with VirtualLoop() as loop:
            assert loop.run(main(seed)) == list(range(20))


def test_a_lost_lane_ends_what_waits_for_it() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            handle, server = await loopback(stack, FaultPlan(), Member())
            assert len(await handle.call("echo", bytes(5000))) == 5000
            (carrier,) = server.inbound.bulk._connections
            future = handle.call("numbers", [])
            waiting = handle.call("echo", bytes(5000))
            carrier.link.close()
            with pytest.raises(PeerLost):
                await waiting
            future.cancel()

    with VirtualLoop() as loop:
        loop.run(main())
        assert loop.time() < 1010


class Recorder:
    """The host of a receiving half: notes what is delivered."""

    def __init__(self) -> None:
        self.delivered: list[tuple[Header, Frames]] = []

    def deliver(self, channel: Channel, header: Header, payload: Frames) -> None:
        self.delivered.append((header, payload))

    def order_of(self, call: Call) -> str | None:
        return call.target or None


def call(number: int, target: str = "A:0") -> Call:
    return Call(number, target, 0, "m", 5.0, 0, ())


def receiving() -> tuple[Recorder, BulkReceiver]:
    host = Recorder()
    return host, BulkReceiver(host, Channel.__new__(Channel))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_messages_of_one_place_are_delivered_in_order_and_none_is_lost(data: st.DataObject) -> None:
    """Headers and payloads arrive in any interleaving, some messages are cancelled."""
    host, incoming = receiving()
    numbers = range(data.draw(st.integers(1, 12)))
    detached = {n for n in numbers if data.draw(st.booleans())}
    targets = {n: data.draw(st.sampled_from(["A:0", "B:0", ""])) for n in numbers}
    cancelled = {n for n in numbers if data.draw(st.integers(0, 5)) == 0}
    events: list[Callable[[], None]] = []
    bulk = [n for n in numbers if n in detached]
    small: list[tuple[str, int]] = [("call", n) for n in numbers]
    for n in cancelled:
        small.insert(data.draw(st.integers(small.index(("call", n)) + 1, len(small))), ("cancel", n))

    def message(what: str, n: int) -> None:
        header: Header = call(n, targets[n]) if what == "call" else Cancel(n)
        if what == "call" and n in detached:
            incoming.on_detached(detach(header, n))
        elif not incoming.holds(header, [b"%d" % n]):
            host.delivered.append((header, [b"%d" % n]))

    while small or bulk:
        if small and (not bulk or data.draw(st.booleans())):
            what, n = small.pop(0)
            events.append(lambda what=what, n=n: message(what, n))  # type: ignore[misc]
        else:
            n = bulk.pop(0)
            events.append(lambda n=n: incoming.on_bulk(Bulk(n, (len(b"%d" % n),)), [b"%d" % n]))  # type: ignore[misc]
    for event in events:
        event()

    started = [header.call_id for header, _ in host.delivered if type(header) is Call]
    assert len(started) == len(set(started))
    for target in ("A:0", "B:0"):
        mine = [n for n in started if targets[n] == target]
        assert mine == sorted(mine)
    told = {header.call_id for header, _ in host.delivered if type(header) is Cancel}
    assert set(numbers) - cancelled <= set(started), "all that was not cancelled was delivered"
    assert told <= set(started), "a cancelled call was either delivered before or never"
    assert all(payload == [b"%d" % h.call_id] for h, payload in host.delivered if type(h) is Call)
    assert not (incoming._queues or incoming._waiting or incoming._arrived or incoming._calls or incoming._unwanted)


def test_parts_make_the_payload_or_are_malformed() -> None:
    host, incoming = receiving()
    incoming.on_bulk(Bulk(1, (3, 0, 5)), [])
    incoming.on_part(BulkPart(1), [b"abc"])
    with pytest.raises(MalformedFrame, match="more than its payload"):
        incoming.on_part(BulkPart(1), [b"123456"])
    incoming.on_part(BulkPart(1), [b"1234"])
    incoming.on_part(BulkPart(1), [b"5"])
    incoming.on_detached(detach(Reply(9, True, 0, 0, 0), 1))
    assert host.delivered == [(Reply(9, True, 0, 0, 0), [b"abc", b"", b"12345"])]
    wrong: list[Callable[[], None]] = [
        lambda: incoming.on_part(BulkPart(1), [b"x"]),
        lambda: incoming.on_part(BulkPart(2), []),
        lambda: incoming.on_bulk(Bulk(3, (-1,)), []),
        lambda: incoming.on_bulk(Bulk(3, (1 << 60,)), []),
        lambda: incoming.on_bulk(Bulk(3, ("x",)), []),  # type: ignore[arg-type]
        lambda: incoming.on_bulk(Bulk(3, (4,)), [b"123"]),
        lambda: incoming.on_detached(Detached(4, 6, (1,))),
        lambda: incoming.on_detached(Detached(4, 99, ())),
        lambda: incoming.on_detached(Detached(4, 4, ("no call",))),
    ]
    for act in wrong:
        with pytest.raises(MalformedFrame):
            act()
