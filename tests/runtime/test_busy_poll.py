"""A loop polls for a quick answer, and only for one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlmesh.runtime.network import NetworkOptions
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

KEY = b"k" * 32


class Member:
    @rpc
    def quick(self, value: int) -> int:
        return value

    @rpc(concurrent=10)
    async def slow(self) -> None:
        await asyncio.sleep(0.05)


async def _turns(tmp_path: Path, options: NetworkOptions) -> tuple[int, int, int]:
    """How often the loop looked during quick calls, slow ones, and quick ones that are on their way together."""
    with Runtime.start(name="M:0", key=KEY, socket_dir=tmp_path) as served:
        served.serve("M:0", Member())
        assert served.endpoint is not None
        async with Runtime.open(key=KEY, bind=False, network=options) as runtime:
            handle = runtime.peer("M:0", served.endpoint)
            poll = runtime._calls.busy_poll

            def looked() -> int:
                return poll.turns if poll is not None else 0

            counts = []
            for number in range(200):
                assert await handle.call(Member.quick, number) == number
            counts.append(looked())
            await handle.call(Member.slow)
            before = looked()
            for _ in range(3):
                await handle.call(Member.slow)
            counts.append(looked() - before)
            await handle.call(Member.quick, 0)
            before = looked()
            for _ in range(20):
                await asyncio.gather(*(handle.call(Member.quick, number) for number in range(5)))
            counts.append(looked() - before)
            return counts[0], counts[1], counts[2]


async def test_it_looks_for_quick_answers_only(tmp_path: Path) -> None:
    quick, slow, together = await _turns(tmp_path, NetworkOptions(busy_poll_s=0.02))
    assert quick > 200
    assert slow == 0
    assert together == 0


async def test_it_can_be_turned_off(tmp_path: Path) -> None:
    assert await _turns(tmp_path, NetworkOptions(busy_poll_s=0)) == (0, 0, 0)
