"""A service that joined finds members where they are now, and is told of those that ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rlmesh.errors import PeerLost, RoleNotFound
from rlmesh.job.status import ExitInfo
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.connections.joining import MembershipUpdate
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.testing import LoopbackNetwork, VirtualLoop
from tests.runtime.conftest import KEY

MASTER = "loop://master"


class Master:
    """Answers as a job's master does."""

    def __init__(self) -> None:
        self.view = MembershipUpdate("j-1", "j", 42.0, AddressBook(0, ()), (), 0)
        self.changed = asyncio.Event()
        self.asked: list[tuple[int, int]] = []

    @rpc(concurrent=16)
    async def follow(self, version: int, exits_seen: int, wait_s: float) -> MembershipUpdate:
        self.asked.append((version, exits_seen))
        try:
            async with asyncio.timeout(wait_s):
                while (self.view.book.version, self.view.exits_seen) == (version, exits_seen):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pass
        return self.view

    def publish(self, version: int, *endpoints: str, exits: tuple[ExitInfo, ...] = ()) -> None:
        members = tuple(MemberAddress("A", rank, version - 1, each) for rank, each in enumerate(endpoints))
        self.view = MembershipUpdate(
            "j-1", "j", 42.0, AddressBook(version, members), exits, self.view.exits_seen + len(exits)
        )
        self.changed.set()


class Member:
    def __init__(self, name: str) -> None:
        self.name = name

    @rpc
    async def who(self) -> str:
        return self.name


@asynccontextmanager
async def job() -> AsyncIterator[tuple[Master, NetworkOptions, Runtime]]:
    """A master, and members at two addresses."""
    options = NetworkOptions(transports=LoopbackNetwork().transports)
    master = Master()
    async with (
        Runtime.open(name="@master", key=KEY, bind=MASTER, network=options) as served,
        Runtime.open(name="A:0", key=KEY, bind="loop://old", network=options) as old,
        Runtime.open(name="A:0", key=KEY, bind="loop://new", network=options) as new,
    ):
        served.serve("@master", master, inline=True)
        old.serve("A:0", Member("old"), incarnation=0)
        new.serve("A:0", Member("new"), incarnation=1)
        yield master, options, served


def virtual(main: Any) -> float:
    """Run in virtual time; the seconds that it took."""
    with VirtualLoop() as loop:
        loop.run(main())
        return loop.time() - 1000.0


def test_members_are_followed_to_new_addresses_and_their_ends_are_told() -> None:
    async def main() -> None:
        async with job() as (master, options, _):
            master.publish(1, "loop://old")
            async with Runtime.join(MASTER, key=KEY, network=options) as runtime:
                assert runtime.outbound.default_timeout_s == 42.0
                group: RoleGroup[Any] = RoleGroup("A", runtime=runtime)
                assert await group.call("who") == ["old"]
                end = ExitInfo("A", 0, 0, 11, None, 9, time.time(), hostname="h")
                master.publish(2, "loop://new", exits=(end,))
                await asyncio.sleep(0.1)
                assert await group.call("who") == ["new"]
                await asyncio.sleep(65)  # Unchanged: it asks again and again, and each question has its end.
                assert await group.call("who") == ["new"]
                assert master.asked[-1] == (2, 1)
            asked = len(master.asked)
            await asyncio.sleep(100)
            assert len(master.asked) == asked, "who left asks no more"

    assert virtual(main) < 300


@pytest.mark.parametrize("after_s", [3.0, 28.0])
def test_a_job_that_just_starts_is_waited_for(after_s: float) -> None:
    async def main() -> None:
        async with job() as (master, options, _):
            asyncio.get_running_loop().call_later(after_s, master.publish, 1, "loop://old")
            async with Runtime.join(MASTER, key=KEY, network=options, timeout_s=30) as runtime:
                assert await RoleGroup[Any]("A", runtime=runtime).call("who") == ["old"]
                with pytest.raises(RoleNotFound, match="its roles: A"):
                    RoleGroup[Any]("B", runtime=runtime).call("who")

    assert virtual(main) < 60


def test_a_job_without_members_is_joined_by_nobody() -> None:
    async def main() -> None:
        async with job() as (_, options, _):
            with pytest.raises(TimeoutError, match="job j has no members after 30 s"):
                async with Runtime.join(MASTER, key=KEY, network=options, timeout_s=30):
                    pass

    assert 30 <= virtual(main) < 35


def test_a_master_that_comes_back_is_found_again() -> None:
    """It is started anew at its address, knows the members, and counts their ends from nothing."""

    async def main() -> None:
        async with job() as (master, options, served):
            master.publish(1, "loop://old")
            async with Runtime.join(MASTER, key=KEY, network=options) as runtime:
                group: RoleGroup[Any] = RoleGroup("A", runtime=runtime)
                assert await group.call("who") == ["old"]
                served.close()
                await asyncio.sleep(5)
                assert await group.call("who") == ["old"], "nobody needs the master for a call"
                second = Master()
                end = ExitInfo("A", 0, 0, 11, None, 9, time.time(), hostname="h")
                second.publish(2, "loop://new", exits=(end,))
                async with Runtime.open(name="@master", key=KEY, bind=MASTER, network=options) as again:
                    again.serve("@master", second, inline=True)
                    await asyncio.sleep(70)
                    assert await group.call("who") == ["new"]
                    asked = len(second.asked)
                    await asyncio.sleep(70)
                    assert len(second.asked) > asked, "and it goes on being followed"

    assert virtual(main) < 400


def test_the_end_of_the_job_is_no_end_of_the_service() -> None:
    async def main() -> None:
        async with job() as (master, options, served):
            master.publish(1, "loop://old")
            async with Runtime.join(MASTER, key=KEY, network=options) as runtime:
                group: RoleGroup[Any] = RoleGroup("A", runtime=runtime)
                assert await group.call("who") == ["old"]
                served.close()
                await asyncio.sleep(100)
                assert await group.call("who") == ["old"], "members that are there still answer"

    assert virtual(main) < 300


def test_nobody_there_is_told_in_time() -> None:
    async def main() -> None:
        options = NetworkOptions(transports=LoopbackNetwork().transports)
        with pytest.raises(PeerLost, match=r"no job answers at loop://master: .* it is not connected"):
            async with Runtime.join(MASTER, key=KEY, network=options, timeout_s=5):
                pass

    assert 5 <= virtual(main) < 6
