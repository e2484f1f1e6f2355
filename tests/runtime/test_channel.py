"""What leaves when: messages of one turn travel together, a lone one does not wait, a full turn does not pile up."""

from __future__ import annotations

import asyncio

from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport.base import Link
from rlmesh.wire.envelope import Call, Frames, unpack


class Recorder:
    """A link that notes how many messages each packet had."""

    thread_safe = True
    peer = "recorder"
    chunk_bytes = None

    def __init__(self) -> None:
        self.packets: list[int] = []

    def send(self, frames: Frames) -> None:
        self.packets.append(sum(type(header) is Call for header, _ in unpack(frames)))

    def trust(self) -> None:
        pass

    def close(self) -> None:
        pass


async def _packets(calls: int, *, awaited: bool) -> list[int]:
    """Sizes of the packets of one turn in which so many calls were made."""
    async with Runtime.open(bind=False) as runtime:
        link = Recorder()
        runtime._calls.connections._connect_link = lambda endpoint: _as_link(link)
        runtime._calls.connections._shake_hands = lambda channel, endpoint: setattr(channel, "authenticated", True)
        handle = runtime.peer("A:0", "unix:///nowhere")
        first = handle.call("hello")
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        link.packets.clear()
        futures = [handle.call("echo", number) for number in range(calls)]
        waiting = asyncio.ensure_future(_wait(futures[0])) if awaited else None
        before_turn_ends = list(link.packets)
        await asyncio.sleep(0.01)
        packets = [size for size in link.packets if size]
        for future in futures:
            future.cancel()
        if waiting is not None:
            await asyncio.wait([waiting])
        assert before_turn_ends == packets[: len(before_turn_ends)]
        return packets


async def _wait(future: object) -> None:
    await future  # type: ignore[misc]


def _as_link(link: Recorder) -> Link:
    return link  # type: ignore[return-value]


async def test_calls_of_one_turn_travel_together() -> None:
    assert await _packets(40, awaited=False) == [40]


async def test_a_full_turn_is_sent_in_parts_so_that_the_peer_begins() -> None:
    packets = await _packets(1000, awaited=True)
    assert sum(packets) == 1000
    assert len(packets) > 10 and max(packets) <= 65


async def test_a_lone_call_leaves_when_it_is_awaited() -> None:
    async with Runtime.open(bind=False) as runtime:
        link = Recorder()
        runtime._calls.connections._connect_link = lambda endpoint: _as_link(link)
        runtime._calls.connections._shake_hands = lambda channel, endpoint: setattr(channel, "authenticated", True)
        handle = runtime.peer("A:0", "unix:///nowhere")
        first = handle.call("hello")
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        link.packets.clear()
        future = handle.call("echo", 1)
        assert link.packets == [], "it might have company"
        future.add_done_callback(lambda _: None)
        assert link.packets == [1], "somebody waits"
        future.cancel()
        await asyncio.sleep(0)
