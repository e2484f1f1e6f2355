"""The contract of a transport, the same for each: in order, whole, both ways, and nobody is lost unnoticed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import pytest

from rlmesh.errors import UsageError
from rlmesh.runtime.connections.network import NetworkOptions, plain
from rlmesh.runtime.process.loops import Posts
from rlmesh.runtime.transport.base import UNAUTHENTICATED_LIMIT_BYTES, Link, Rejection, Transport
from rlmesh.testing import FaultPlan, LoopbackNetwork, faulty
from rlmesh.wire.envelope import Frames
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY
from tests.runtime.strangers import SCHEMES, address_of


class Side:
    """A transport and all that it tells."""

    def __init__(self, options: NetworkOptions, address: str) -> None:
        self.loop = asyncio.get_running_loop()
        scheme, factory = options.factory(address)
        self.packets: list[list[bytes]] = []
        self.links: list[Link] = []
        self.lost: list[Link] = []
        self.rejected: list[tuple[Link, str, Rejection | None]] = []
        self.refused: list[tuple[str, Rejection]] = []
        self.trusting = True
        self._changed = asyncio.Event()
        self.transport: Transport = factory(self, self.loop, Posts(self.loop).put, KEY)
        self.scheme = scheme

    def on_packet(self, link: Link, frames: Frames) -> None:
        if link not in self.links:
            self.links.append(link)
            if self.trusting:
                link.trust()
        self.packets.append([bytes(frame) for frame in frames])
        self._changed.set()

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append(link)
        self._changed.set()

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        self.rejected.append((link, detail, reason))
        self._changed.set()

    def on_refused(self, peer: str, reason: Rejection, detail: str) -> None:
        self.refused.append((peer, reason))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Pair:
    """A listener and a caller with one link, over which a first packet went."""

    def __init__(self, options: NetworkOptions, address: str) -> None:
        self.options, self.address = options, address
        self.listener, self.caller = Side(options, address), Side(options, address)

    async def open(self) -> Link:
        self.endpoint = self.listener.transport.bind(self.address)
        self.link = self.caller.transport.connect(self.endpoint)
        self.link.trust()
        self.link.send([b"first"])
        await self.listener.until(lambda: self.listener.packets == [[b"first"]])
        self.listener.packets.clear()
        return self.listener.links[0]

    def close(self) -> None:
        self.caller.transport.close(1)
        self.listener.transport.close(1)


@pytest.fixture(params=["loop", *SCHEMES, "plain", "faulty"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Over each transport, and over one behind a plan without faults."""
    network = LoopbackNetwork()
    transports = dict(network.transports)
    transports |= {"plain": plain, "faulty": faulty(transports["loop"], FaultPlan())}
    with ExitStack() as stack:
        if request.param in SCHEMES:
            address = stack.enter_context(address_of(request.param))
        else:
            address = "plain://127.0.0.1:0" if request.param == "plain" else f"{request.param}://a"
        made = Pair(NetworkOptions(transports=transports), address)
        try:
            yield made
        finally:
            made.close()


SHAPES: list[list[bytes]] = [
    [b""],
    [b"", b"x", b""],
    [b"head", bytes(range(256)) * 1024],
    [b"head", *(b"%d" % n for n in range(3000))],
    [bytes(3_000_000), b"", b"y" * 70_000, b"z"],
]


async def test_packets_arrive_whole_in_order_and_both_ways(pair: Pair) -> None:
    back = await pair.open()
    for _ in range(3):
        for shape in SHAPES:
            pair.link.send(list(shape))
            back.send(list(shape))
    wanted = SHAPES * 3
    await pair.listener.until(lambda: len(pair.listener.packets) == len(wanted))
    await pair.caller.until(lambda: len(pair.caller.packets) == len(wanted))
    assert pair.listener.packets == wanted
    assert pair.caller.packets == wanted
    assert pair.listener.links == [back] and pair.caller.links == [pair.link], "one link is one object"


async def test_what_is_sent_before_the_listener_is_there_is_kept(pair: Pair) -> None:
    if "127.0.0.1" in pair.address:
        probe = Side(pair.options, pair.address)
        pair.address = probe.transport.bind(pair.address)
        probe.transport.close(0)
    link = pair.caller.transport.connect(pair.address)
    for number in range(20):
        link.send([b"%d" % number])
    await asyncio.sleep(0.05)
    pair.listener.transport.bind(pair.address)
    await pair.listener.until(lambda: len(pair.listener.packets) == 20)
    assert pair.listener.packets == [[b"%d" % number] for number in range(20)]


async def test_the_others_are_told_when_a_side_closes(pair: Pair) -> None:
    back = await pair.open()
    pair.link.send([b"last words"])
    pair.caller.transport.close(1)
    await pair.listener.until(lambda: bool(pair.listener.lost))
    assert pair.listener.packets == [[b"last words"]]
    assert pair.listener.lost == [back]
    back.send([b"to nobody"])
    await asyncio.sleep(0.05)
    assert pair.listener.lost == [back] and pair.caller.lost == [], "once, and not to whoever closed it"


async def test_a_closed_link_is_lost_at_the_other_end(pair: Pair) -> None:
    back = await pair.open()
    back.close()
    await pair.caller.until(lambda: bool(pair.caller.lost))
    assert pair.caller.lost == [pair.link]
    back.send([b"too late"])
    pair.link.send([b"too late"])
    back.close()
    again = pair.caller.transport.connect(pair.endpoint)
    again.send([b"again"])
    await pair.listener.until(lambda: [b"again"] in pair.listener.packets)
    assert pair.listener.packets == [[b"again"]] and pair.listener.lost == []


async def test_a_large_packet_of_a_stranger_ends_the_connection(pair: Pair) -> None:
    pair.listener.trusting = False
    back = await pair.open()
    pair.link.send([bytes(UNAUTHENTICATED_LIMIT_BYTES + 1)])
    await pair.listener.until(lambda: bool(pair.listener.rejected))
    assert pair.listener.rejected[0][0] is back and pair.listener.packets == []
    await pair.caller.until(lambda: bool(pair.caller.lost))


async def test_each_threads_packets_keep_their_order(pair: Pair) -> None:
    await pair.open()
    if not pair.link.thread_safe:
        pytest.skip("its links are for the loop only")

    def send(label: int) -> None:
        for number in range(200):
            pair.link.send([b"%d" % label, b"%d" % number, bytes(number * 7)])

    threads = [threading.Thread(target=send, args=(label,)) for label in range(4)]
    for thread in threads:
        thread.start()
    await pair.listener.until(lambda: len(pair.listener.packets) == 800)
    for thread in threads:
        thread.join(HANG_S)
    for label in range(4):
        numbers = [int(number) for who, number, _ in pair.listener.packets if int(who) == label]
        assert numbers == list(range(200))


async def test_what_a_stopped_peer_does_not_take_holds_nobody_up(pair: Pair, own_time: OwnTime) -> None:
    await pair.open()
    if pair.listener.scheme not in ("unix", "plain"):
        pytest.skip("it does not say what has not left")
    taken = pair.listener.transport._links  # type: ignore[attr-defined]
    for link in taken:
        pair.listener.loop.remove_reader(link._socket.fileno())
    assert pair.caller.transport.idle()
    pair.link.send([bytes(8 << 20)])
    await asyncio.sleep(0.05)
    assert not pair.caller.transport.idle()
    began = time.monotonic()
    pair.caller.transport.close(0.1)
    assert own_time.since(began) < 1


async def test_one_address_has_one_listener(pair: Pair) -> None:
    await pair.open()
    with pytest.raises(UsageError):
        pair.caller.transport.bind(pair.endpoint)


@pytest.mark.parametrize("scheme", ["unix", "ipc"])
async def test_the_socket_of_a_listener_that_died_is_replaced(scheme: str) -> None:
    with address_of(scheme) as address:
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(address.partition("://")[2])
        dead.close()
        pair = Pair(NetworkOptions(), address)
        await pair.open()
        pair.close()


def test_an_unknown_scheme_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'udp://x' is no address.*unix://, ipc://, tcp://"):
        NetworkOptions().factory("udp://x")
    with pytest.raises(UsageError, match="is no address"):
        NetworkOptions().factory("")
