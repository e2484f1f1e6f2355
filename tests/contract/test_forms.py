"""Every form of a call, from a plain thread and from each kind of loop: the same results over each transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pytest
import uvloop

from rlmesh import RoleGroup
from rlmesh.errors import RemoteError, RoleNotFound, UsageError
from rlmesh.runtime.rpc import rpc
from rlmesh.testing.in_process import InProcessCluster, TransportName
from tests.runtime.conftest import KEY, Mesh


class Member:
    """Every method twice, as ``def`` and as ``async def``: the second has the suffix ``_async``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.noted: list[Any] = []

    @rpc
    def tag(self, x: Any, *, end: str = "") -> str:
        return f"{self.rank}:{x}{end}"

    @rpc
    async def tag_async(self, x: Any, *, end: str = "") -> str:
        return f"{self.rank}:{x}{end}"

    @rpc
    def tags(self, xs: Sequence[Any], end: str = "") -> list[str]:
        return [f"{self.rank}:{x}{end}" for x in xs]

    @rpc
    async def tags_async(self, xs: Sequence[Any], end: str = "") -> list[str]:
        return [f"{self.rank}:{x}{end}" for x in xs]

    @rpc
    def note(self, x: Any) -> None:
        self.noted.append(x)

    @rpc
    async def note_async(self, x: Any) -> None:
        self.noted.append(x)

    @rpc
    def noted_so_far(self) -> list[Any]:
        return self.noted

    @rpc
    async def noted_so_far_async(self) -> list[Any]:
        return self.noted

    @rpc
    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    @rpc
    async def count_async(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    @rpc
    def refuse(self, x: Any) -> None:
        if self.rank == 1:
            raise ValueError(f"not {x}")

    @rpc
    async def refuse_async(self, x: Any) -> None:
        if self.rank == 1:
            raise ValueError(f"not {x}")


def stub(x: Any) -> str:
    """Names the remote method, and is never run."""
    raise AssertionError


stub.__name__ = "tag"

Group = RoleGroup[Any]
Form = tuple[Callable[[Group, str], Any], Any]

FORMS: dict[str, Form] = {
    "call": (lambda g, s: g.call("tag" + s, 7, end="!"), ["0:7!", "1:7!", "2:7!", "3:7!"]),
    "call by method": (
        lambda g, s: g.call(Member.tag_async if s else Member.tag, 7, end="!"),
        ["0:7!", "1:7!", "2:7!", "3:7!"],
    ),
    "call by bound method": (lambda g, s: g.call(Member(9).tag, 7), ["0:7", "1:7", "2:7", "3:7"]),
    "call by stub": (lambda g, s: g.call(stub, 7), ["0:7", "1:7", "2:7", "3:7"]),
    "call_rank0": (lambda g, s: g.call_rank0("tag" + s, 7), "0:7"),
    "member": (lambda g, s: g[2].call("tag" + s, 7), "2:7"),
    "last member": (lambda g, s: g[-1].call("tag" + s, 7), "3:7"),
    "slice": (lambda g, s: g[1:3].call("tag" + s, 7), ["1:7", "2:7"]),
    "slice of a slice": (lambda g, s: g[1:][1:].call("tag" + s, 7), ["2:7", "3:7"]),
    "along": (lambda g, s: g.along("dp").call("tag" + s, 7), ["0:7", "2:7"]),
    "along at": (lambda g, s: g.along("tp", dp=1).call("tag" + s, 7), ["2:7", "3:7"]),
    "options": (lambda g, s: g.options(timeout_s=5, idempotent=True)[3].call("tag" + s, 7), "3:7"),
    "scatter": (lambda g, s: g.call("tag" + s, [4, 5, 6, 7], end="!", _scatter=True), ["0:4!", "1:5!", "2:6!", "3:7!"]),
    "scatter an array": (lambda g, s: g[:2].call("tag" + s, np.arange(2), _scatter=True), ["0:0", "1:1"]),
    "call_batch": (
        lambda g, s: g.call_batch("tags" + s, 6, list("abcdef"), end="!"),
        ["0:a!", "0:b!", "1:c!", "1:d!", "2:e!", "3:f!"],
    ),
    "call_batch of fewer": (lambda g, s: g.call_batch("tags" + s, 2, (1, 2)), ["0:1", "1:2"]),
    "call_batch of none": (lambda g, s: g.call_batch("tags" + s, 0, []), []),
    "call_batch without a number": (lambda g, s: g[:2].call_batch("tags" + s, [1, 2, 3]), ["0:1", "0:2", "1:3"]),
    "call_batch by a keyword": (lambda g, s: g[:2].call_batch("tags" + s, xs=(1, 2), end="!"), ["0:1!", "1:2!"]),
    "call_shards": (
        lambda g, s: g.call_shards("tag" + s, list("abcdef")),
        ["0:['a', 'b']", "1:['c', 'd']", "2:['e']", "3:['f']"],
    ),
    "call_shards by method": (
        lambda g, s: g.call_shards(Member.tag_async if s else Member.tag, 3, [7, 8, 9]),
        ["0:[7]", "1:[8]", "2:[9]"],
    ),
    "call_shards of none": (lambda g, s: g.call_shards("tag" + s, []), []),
    "scatter by an option": (
        lambda g, s: g.options(scatter=True).call("tag" + s, [4, 5, 6, 7]),
        ["0:4", "1:5", "2:6", "3:7"],
    ),
    "call_any of one": (lambda g, s: g[3:].call_any("tag" + s, 7), "3:7"),
    "results as arguments": (lambda g, s: g[1].call("tag" + s, g[0].call("tag" + s, 7)), "1:0:7"),
    "batches as arguments": (
        lambda g, s: g[:2].call_batch("tags" + s, 3, g.call_batch("tags" + s, 3, [1, 2, 3])),
        ["0:0:1", "0:1:2", "1:2:3"],
    ),
    "failures as values": (lambda g, s: g[2:].options(return_exceptions=True).call("refuse" + s, 7), [None, None]),
}

SUFFIXES = ("", "_async")


def serve(cluster: InProcessCluster) -> Group:
    return cluster.serve("M", *[Member(rank) for rank in range(4)], axes={"dp": 2, "tp": 2})


def check_names(group: Group) -> None:
    """Wrong names are refused where they are used, before anything is sent."""
    with pytest.raises(RoleNotFound, match="did you mean M"):
        RoleGroup("m").call("tag", 1)
    with pytest.raises(RoleNotFound, match="no member 4"):
        group[4]
    with pytest.raises(UsageError, match="argument 1 has 3 items for a scatter over 4 members"):
        group.call("tag", [1, 2, 3], _scatter=True)
    with pytest.raises(UsageError, match="argument 1 of the batch call has 3 items, but the batch has 4"):
        group.call_batch("tags", 4, [1, 2, 3])


def test_every_form_works_from_a_plain_thread(mesh: Mesh, until: Callable[..., None]) -> None:
    group = serve(mesh)
    for suffix in SUFFIXES:
        for name, (form, expected) in FORMS.items():
            assert form(group, suffix).result() == expected, name
        assert sorted(group.stream("count" + suffix, 3)) == sorted([0, 1, 2] * 4)
        assert list(group[1].stream("count" + suffix, 3)) == [0, 1, 2]
        assert group.call_any("tag" + suffix, 7).result() in {f"{rank}:7" for rank in range(4)}
        group.notify("note" + suffix, suffix)
        group[1].notify("note" + suffix, "more")
        noted = group.call("noted_so_far" + suffix).result()
        assert [seen[-1] for seen in noted] == [suffix, "more", suffix, suffix]
        with pytest.raises(ValueError, match="not 7") as caught:
            group.call("refuse" + suffix, 7).result()
        assert isinstance(caught.value, RemoteError) and caught.value.rank == 1
    check_names(group)
    until(lambda: mesh.caller.activity.pending() == [])


async def every_form(group: Group) -> None:
    for suffix in SUFFIXES:
        for name, (form, expected) in FORMS.items():
            assert await form(group, suffix) == expected, name
        assert sorted([item async for item in group.stream("count" + suffix, 3)]) == sorted([0, 1, 2] * 4)
        assert [item async for item in group[1].stream("count" + suffix, 3)] == [0, 1, 2]
        assert await group.call_any("tag" + suffix, 7) in {f"{rank}:7" for rank in range(4)}
        batch = group.call_batch("tags" + suffix, 5, list(range(5)))
        pairs = [pair async for pair in batch.as_completed()]
        assert sorted(pairs) == list(enumerate([item async for item in batch]))
        group.notify("note" + suffix, suffix)
        noted = await group.call("noted_so_far" + suffix)
        assert [seen[-1] for seen in noted] == [suffix] * 4
        with pytest.raises(ValueError, match="not 7"):
            await group.call("refuse" + suffix, 7)
    check_names(group)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_every_form_works_from_another_loop(
    mesh: Mesh, until: Callable[..., None], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    group = serve(mesh)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(every_form(group))
    until(lambda: mesh.caller.activity.pending() == [])


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("transport", get_args(TransportName))
def test_every_form_works_from_the_loop_that_runs_everything(
    transport: TransportName, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        async with InProcessCluster(transport, key=KEY) as cluster:
            await every_form(serve(cluster))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
