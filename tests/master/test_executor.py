"""What the executor makes of answers that do not come."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, PeerLost
from rlmesh.master import events as ev
from rlmesh.master import executor as module
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
    await executor._begin_run(member)
    return posted


async def test_how_a_member_died_that_was_told_to_run_is_left_to_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await begun(PeerLost("closed"), monkeypatch, news_s=0.1) == []
    (failed,) = await begun(PeerLost("closed"), monkeypatch, news_s=None)
    assert isinstance(failed, ev.MemberFailed) and "did not answer: PeerLost: closed" in failed.error
    (failed,) = await begun(CallTimeout("late"), monkeypatch, news_s=None)
    assert "did not answer: CallTimeout: late" in failed.error
