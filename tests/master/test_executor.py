"""What the executor makes of answers that do not come."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, PeerLost
from rlmesh.master import events as ev
from rlmesh.master import executor as module
from rlmesh.master.context import Member
from rlmesh.master.executor import Executor


async def begun(error: Exception, monkeypatch: pytest.MonkeyPatch, *, news_s: float | None) -> list[Any]:
    """What is posted of a member that does not begin; its agent tells of its end after so long."""
    member: Any = SimpleNamespace(id=("ADDER", 1), name="ADDER:1", incarnation=0, gone=False)
    posted: list[Any] = []
    runtime: Any = None
    executor = Executor(runtime, runtime, runtime, posted.append)

    async def call(*args: object) -> bool:
        raise error

    control = SimpleNamespace(options=lambda **options: SimpleNamespace(call=call))
    monkeypatch.setattr(executor, "_control", lambda member: control)
    monkeypatch.setattr(module, "END_NEWS_S", 0.3)
    if news_s is not None:
        asyncio.get_running_loop().call_later(news_s, setattr, member, "gone", True)
    await executor._begin_run(member, 0)
    return posted


async def test_how_a_member_died_that_was_told_to_run_is_left_to_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await begun(PeerLost("closed"), monkeypatch, news_s=0.1) == []
    (failed,) = await begun(PeerLost("closed"), monkeypatch, news_s=None)
    assert isinstance(failed, ev.MemberFailed) and "did not answer: PeerLost: closed" in failed.error
    (failed,) = await begun(CallTimeout("late"), monkeypatch, news_s=None)
    assert "did not answer: CallTimeout: late" in failed.error


class Nothing:
    """Whatever is asked of it is nothing, and so is what that gives."""

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return Nothing()


def group_of_two(posted: list[Any]) -> tuple[Executor, dict[tuple[str, int], Any]]:
    """An executor whose job has an elastic role, on nodes 0 and 1."""
    members: dict[tuple[str, int], Any] = {}
    for rank in range(2):
        placement: Any = SimpleNamespace(role="ACTOR", rank=rank, node_rank=rank, process=None, group="")
        members["ACTOR", rank] = Member(placement, "", spawned=True)
    limits = SimpleNamespace(start_s=5.0)
    context = SimpleNamespace(
        members=members, plan=None, terms={}, nodes={0: Nothing(), 1: Nothing()}, spec=SimpleNamespace(limits=limits)
    )
    runtime: Any = Nothing()
    manager: Any = SimpleNamespace(context=context, ports={})
    return Executor(runtime, manager, runtime, posted.append), members


@pytest.mark.case("n01")
async def test_an_order_to_start_a_generation_starts_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is busy with another order while the rank on the other node starts, and dies."""
    posted: list[Any] = []
    executor, members = group_of_two(posted)
    asked: list[Any] = []
    busy = asyncio.Event()

    async def ask(node_rank: int, timeout_s: float, method: str, *args: Any) -> list[int]:
        asked.append((node_rank, method))
        return []

    monkeypatch.setattr(executor, "_ask_agent", ask)
    executor._spawn_task(1, _until_set(busy))
    executor.perform([(1, ev.Spawn(1, (("ACTOR", 1),)))])
    for member in members.values():
        member.next_incarnation(hidden=False, now=1.0)
    busy.set()
    await asyncio.wait_for(asyncio.gather(*executor._tasks), 5)
    assert asked == [], "the new generation is started by an order of its own"
    (exited,) = posted
    assert isinstance(exited, ev.MemberExited)
    assert (exited.exit.role, exited.exit.rank, exited.exit.incarnation) == ("ACTOR", 1, 0)


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()


@pytest.mark.case("n01")
async def test_an_order_to_run_is_for_the_generation_that_was_ready() -> None:
    posted: list[Any] = []
    executor, members = group_of_two(posted)
    executor.perform([(1, ev.BeginRun(("ACTOR", 0)))])
    members["ACTOR", 0].next_incarnation(hidden=False, now=1.0)
    await asyncio.wait_for(asyncio.gather(*executor._tasks), 5)
    assert posted == []
