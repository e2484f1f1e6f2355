"""Whose word the stacks of members are: their own, their agent's, or nobody's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from rlmesh.errors import CallTimeout
from rlmesh.job.status import MemberStack
from rlmesh.master.context import Member
from rlmesh.master.monitoring.member_stacks import examine, stack_text
from rlmesh.placement.planner import Placement
from rlmesh.runtime.runtime import Runtime

OWN = 'Main thread 0x1 [MainThread] (most recent call first):\n  File "own.py", line 3 in work'


METHODS: tuple[str, ...] = ()
"""The only answer of a peer that is too slow to write its stacks."""


def member(role: str, endpoint: str, node_rank: int = 0) -> Member:
    place = Placement(role, 0, node_rank, 0, 1, 0, 1, (), 0, 0)
    return Member(place, "log", "running", pid=7, endpoint=endpoint)


class _Peer:
    """Answers what it is asked, or not at all."""

    def __init__(self, answer: Any = None) -> None:
        self._answer, self.asked = answer, []  # type: tuple[Any, list[Any]]

    def options(self, **_: Any) -> _Peer:
        return self

    async def call(self, method: str, *args: Any) -> Any:
        if method != "methods":
            self.asked.append((method, *args))
        if self._answer is None or (self._answer is METHODS and method != "methods"):
            raise CallTimeout("no answer came")
        return self._answer(*args) if callable(self._answer) else self._answer


class _Members:
    """A runtime whose peers are the members, by endpoint; it counts who is asked."""

    def __init__(self, **peers: _Peer) -> None:
        self.peers = peers

    def peer(self, name: str, endpoint: str) -> _Peer:
        assert name == "@control"
        return self.peers[endpoint]


def look(keys: tuple[Any, ...], silent: tuple[Any, ...]) -> tuple[MemberStack, ...]:
    """What an agent sees: the processes of all that are there, and what those write that get its signal."""
    here = [
        MemberStack(key[0], key[1], key[2], 7, "sleeps", "", 1.0, "by a signal" if key in silent else "")
        for key in keys
    ]
    return tuple(stack for stack in here if stack.role != "GONE")


async def test_only_who_does_not_answer_gets_a_signal() -> None:
    members = [member("A", "a"), member("B", "b"), member("GONE", "c"), member("NEW", "")]
    runtime = _Members(a=_Peer(OWN), b=_Peer(), c=_Peer())
    agent = _Peer(look)
    a, b, gone, new = await examine(cast(Runtime, runtime), members, lambda node: cast(Any, agent))
    ((_, _, silent),) = agent.asked
    assert silent == (("B", 0, 0), ("GONE", 0, 0), ("NEW", 0, 0))
    assert (a.text, a.state, a.cpu_s, a.frames) == (OWN, "sleeps", 1.0, ("own.py:3 in work",))
    assert b.text == new.text == "by a signal"
    assert (gone.state, gone.text) == ("is gone", "it has ended")
    assert stack_text(a) == f"A:0 (pid 7) sleeps, 1.0 s of processor time\n{OWN}\n"


async def test_members_that_share_a_process_are_asked_once_and_have_its_stacks() -> None:
    first = member("A", "a")
    second = member("B", "a")
    second.placement = replace(second.placement, process=("A", 0))
    process = _Peer(OWN)
    stacks = await examine(cast(Runtime, _Members(a=process)), [first, second], lambda node: cast(Any, _Peer(look)))
    assert [stack.text for stack in stacks] == [OWN, OWN] and len(process.asked) == 1


async def test_an_agent_that_does_not_answer_takes_no_stacks_away() -> None:
    members = [member("A", "a"), member("B", "b"), member("C", "c", node_rank=1)]
    runtime = _Members(a=_Peer(OWN), b=_Peer(), c=_Peer())
    agents = {0: _Peer(), 1: _Peer(look)}
    a, b, c = await examine(cast(Runtime, runtime), members, lambda node: cast(Any, agents[node]))
    assert (a.text, a.state) == (OWN, "answers")
    assert b.state == "is out of sight" and b.text.startswith("neither it nor its agent answered: no answer came")
    assert c.text == "by a signal"


async def test_nobody_gets_a_signal_if_none_may_be_sent() -> None:
    agent = _Peer(look)
    (stack,) = await examine(
        cast(Runtime, _Members(a=_Peer())), [member("A", "a")], lambda node: cast(Any, agent), signal=False
    )
    assert agent.asked == [("examine", (("A", 0, 0),), ())]
    assert stack.text == "" and stack.state == "sleeps"


async def test_a_member_that_answers_and_is_slow_to_write_its_stacks_gets_no_signal() -> None:
    agent = _Peer(look)
    slow = member("A", "a")
    (stack,) = await examine(cast(Runtime, _Members(a=_Peer(METHODS))), [slow], lambda node: cast(Any, agent))
    assert agent.asked == [("examine", (("A", 0, 0),), ())]
    assert (stack.text, stack.state) == ("it answers, but its stacks did not come: no answer came", "sleeps")
