"""Streams are cut into packets whatever way their bytes arrive, and noise ends them: it never hangs or grows them."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlmesh.runtime.process.loops import Posts
from rlmesh.runtime.transport import stream
from rlmesh.runtime.transport.base import PACKET_LIMIT_BYTES, Link, Rejection
from rlmesh.runtime.transport.stream import PacketReader, StreamLink
from rlmesh.wire.envelope import Frames

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

packets_of = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=5)
large_frames = st.one_of(st.binary(max_size=40), st.sampled_from([b"L" * 70_000, b"M" * 300_000]))
large_packets = st.lists(st.lists(large_frames, min_size=1, max_size=3), max_size=3)


def bytes_of(packets: list[list[bytes]]) -> bytes:
    return b"".join(bytes(part) for packet in packets for part in stream._parts(list(packet)))


HEAD = bytes_of([[]])
"""A packet without frames: the magic of 4 bytes, and the number of frames."""


def read(data: bytes, sizes: list[int], limit: int = PACKET_LIMIT_BYTES, widen_after: int = 0) -> list[list[bytes]]:
    """All packets of a stream that arrives in pieces of the given sizes, in turn; the reader is widened after so many
    packets."""
    reader = PacketReader()
    if not widen_after:
        reader.widen()
    found: list[list[bytes]] = []
    at, turn = 0, 0
    while at < len(data):
        space = reader.space()
        assert len(space) > 0, "a reader without room would read for ever"
        count = min(len(space), max(1, sizes[turn % len(sizes)]), len(data) - at)
        space[:count] = data[at : at + count]
        reader.on_read(count)
        at, turn = at + count, turn + 1
        while (packet := reader.next_packet(limit)) is not None:
            found.append([bytes(frame) for frame in packet])
            if len(found) == widen_after:
                reader.widen()
    return found


@SLOW
@given(st.one_of(packets_of, large_packets), st.lists(st.integers(1, 400_000), min_size=1, max_size=4))
def test_packets_come_back_however_they_are_cut(packets: list[list[bytes]], sizes: list[int]) -> None:
    assert read(bytes_of(packets), sizes) == packets
    assert read(bytes_of([[b"greeting"], *packets]), sizes, widen_after=1) == [[b"greeting"], *packets]


@SLOW
@given(st.one_of(packets_of, large_packets), st.data())
def test_a_truncated_stream_gives_what_was_whole(packets: list[list[bytes]], data: st.DataObject) -> None:
    whole = bytes_of(packets)
    cut = data.draw(st.integers(0, len(whole)))
    found = read(whole[:cut], [data.draw(st.integers(1, 1000))])
    ends = [len(bytes_of(packets[:count])) for count in range(1, len(packets) + 1)]
    assert found == packets[: sum(end <= cut for end in ends)]


@SLOW
@given(packets_of, st.data())
def test_an_altered_stream_ends_or_gives_packets(packets: list[list[bytes]], data: st.DataObject) -> None:
    whole = bytearray(bytes_of(packets))
    if whole:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(whole), [data.draw(st.integers(1, 1000))], limit=1 << 20)
    except ValueError:
        return
    assert sum(len(frame) for packet in found for frame in packet) <= len(whole)


@given(st.binary(max_size=2000), st.lists(st.integers(1, 100), min_size=1, max_size=3))
def test_noise_is_no_packet(noise: bytes, sizes: list[int]) -> None:
    assume(len(noise) >= len(HEAD) and noise[:4] != HEAD[:4])
    with pytest.raises(ValueError, match="where a packet should begin"):
        read(noise, sizes)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (struct.pack("<4sI", b"RLM1", 1 << 31), "frames is above this side.s limit"),
        (struct.pack("<4sIQ", b"RLM1", 1, 1 << 63), "above the limit"),
        (struct.pack("<4sIQ", b"RLM1", 1, PACKET_LIMIT_BYTES), "no memory for a frame"),
    ],
    ids=["frames", "bytes", "memory"],
)
def test_a_packet_that_nobody_can_take_ends_the_stream(head: bytes, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(size: int) -> bytearray:
        raise MemoryError

    reader = PacketReader()
    reader.widen()
    monkeypatch.setattr(stream, "allocate", no_memory)
    reader.space()[: len(head)] = head
    reader.on_read(len(head))
    with pytest.raises(ValueError, match=text):
        reader.next_packet(PACKET_LIMIT_BYTES)


class Owner:
    """Collects what one link says."""

    scheme = "unix://"

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.post = Posts(self.loop).put
        self.receiver: Any = self
        self.events: list[str] = []
        self.packets = asyncio.Semaphore(0)
        self.ended = asyncio.Event()

    def trusted(self, link: StreamLink) -> None: ...

    def forget(self, link: StreamLink) -> None: ...

    def on_packet(self, link: Link, frames: Frames) -> None:
        self.events.append("packet")
        self.packets.release()

    def on_lost(self, link: Link, reason: str) -> None:
        self.events.append("lost")
        self.ended.set()

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        self.events.append("rejected")
        self.ended.set()


@SLOW
@given(st.binary(max_size=3000), st.booleans())
def test_a_link_ends_after_any_bytes(noise: bytes, trusted: bool) -> None:
    async def main() -> list[str]:
        owner = Owner()
        ours, theirs = socket.socketpair()
        link = StreamLink(owner, "somebody")
        if trusted:
            link.trust()
        link.attach(ours)
        with theirs:
            theirs.sendall(bytes_of([[b"fine"]]) + noise)
            theirs.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(10):
                await owner.ended.wait()
        return owner.events

    events = asyncio.run(main())
    assert events[0] == "packet" and events[-1] in ("lost", "rejected")
    assert events.count("lost") + events.count("rejected") == 1


def test_a_stranger_costs_little_memory() -> None:
    assert len(PacketReader().space()) <= 4096


async def test_no_thread_keeps_a_connection_for_long() -> None:
    """A large packet goes out in turns, so that a small one's sender does not wait for its lock."""
    owner, other = Owner(), Owner()
    ours, theirs = socket.socketpair()
    link, peer = StreamLink(owner, "receiver"), StreamLink(other, "sender")
    peer.trust()
    link.attach(ours)
    peer.attach(theirs)
    link.send([bytes(64 << 20)])
    assert not link.idle, "the loop sends the rest"
    link.send([b"small"])
    async with asyncio.timeout(20):
        await other.packets.acquire()
        await other.packets.acquire()
    link.close()
    peer.close()
