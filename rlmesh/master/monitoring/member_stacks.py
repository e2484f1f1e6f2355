"""Stacks of members' threads: members are asked first, and only silent ones are sent a signal.

The signal makes ``faulthandler`` walk the frames of threads while they run, which can crash a process. It is safe for
members that cannot answer: a member that holds the interpreter lock keeps its other threads still, and a stopped one
does not move. Two kinds of members may be slow and move all the same, and get no signal: one that starts, in an
incident of others; and one that answers a second, small question, and needs longer for the text of its stacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from rlmesh.agent.protocol import CONTROL
from rlmesh.errors import CallError
from rlmesh.job.status import MemberStack
from rlmesh.master.context import Member
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime

__all__ = ["INCIDENT_ANSWER_S", "examine", "stack_text"]

OWN_ANSWER_S = 2.0
"""Seconds to answer; a member that holds the interpreter lock in C takes longer."""
INCIDENT_ANSWER_S = 0.7
"""Seconds to answer during a restart, which ends the other members' current work."""
TEXT_S = 4.0
"""Further seconds for the text of the stacks, which reads source files, of a member that has answered otherwise."""
GONE_POLL_S = 0.05
AGENT_ANSWER_S = 6.0


async def examine(
    runtime: Runtime,
    members: Iterable[Member],
    agent_of: Callable[[int], MemberHandle],
    own_answer_s: float = OWN_ANSWER_S,
    *,
    signal: bool = True,
) -> tuple[MemberStack, ...]:
    """Return one stack per member, in their order; the text says why if there is no stack.

    Takes at most ``own_answer_s`` + ``TEXT_S`` + ``AGENT_ANSWER_S``.

    Args:
        agent_of: returns the agent of a node, by the node's rank.
        signal: send silent members the signal; otherwise they have no stacks.
    """
    asked = tuple(members)
    processes = {member.endpoint: member for member in reversed(asked) if member.endpoint}
    answers = await asyncio.gather(*(_ask(runtime, member, own_answer_s) for member in processes.values()))
    own = {endpoint: text for endpoint, text in zip(processes, answers, strict=True) if text}
    of_node: dict[int, list[Member]] = {}
    for member in asked:
        of_node.setdefault(member.placement.node_rank, []).append(member)
    inspected = await asyncio.gather(
        *(_inspect(agent_of(node), on_it, own, signal=signal) for node, on_it in of_node.items())
    )
    of_key = {stack.key: stack for stacks in inspected for stack in stacks}
    return tuple(of_key[member.key] for member in asked)


async def _ask(runtime: Runtime, member: Member, wait_s: float) -> str:
    """Return a process's own answer; empty if it answers nothing, or ends first."""
    control = runtime.peer(CONTROL, member.endpoint)
    # Both at once: a member that fails of what has happened ends within milliseconds, and its stacks are of now.
    stacks = asyncio.create_task(_answer_of(control.options(timeout_s=wait_s + TEXT_S).call("stacks")))
    alive = asyncio.create_task(_answer_of(control.options(timeout_s=wait_s).call("methods", "")))
    await asyncio.wait((stacks, alive), return_when=asyncio.FIRST_COMPLETED)
    answers = alive.done() and not isinstance(alive.result(), CallError)
    while answers and not stacks.done() and not member.gone:
        await asyncio.wait((stacks,), timeout=GONE_POLL_S)
    alive.cancel()
    if not stacks.done():
        stacks.cancel()
        return ""
    text = stacks.result()
    if isinstance(text, str):
        return text
    return f"it answers, but its stacks did not come: {text}" if answers else ""


async def _answer_of(call: Awaitable[Any]) -> Any:
    """The result of a call, or its error."""
    try:
        return await call
    except CallError as error:
        return error


async def _inspect(
    agent: MemberHandle, members: list[Member], own: dict[str, str], *, signal: bool
) -> list[MemberStack]:
    """Return the stacks of one node's members, with what the system says about their processes."""
    silent = tuple(member.key for member in members if signal and member.endpoint not in own)
    keys = tuple(member.key for member in members)
    missing, why = "is gone", "it has ended"
    try:
        found: tuple[MemberStack, ...] = await agent.options(timeout_s=AGENT_ANSWER_S).call("examine", keys, silent)
    except CallError as error:
        found, missing, why = (), "is out of sight", f"neither it nor its agent answered: {error}"
    of_key = {stack.key: stack for stack in found}
    stacks = []
    for member in members:
        text = own.get(member.endpoint, "")
        stack = of_key.get(member.key)
        if stack is None:
            state = "answers" if text else missing
            stack = MemberStack(*member.key, member.pid, state, text=text or why)
        stacks.append(replace(stack, text=text) if text else stack)
    return stacks


def stack_text(stack: MemberStack) -> str:
    """Return a text: the member with its process's state, then its threads."""
    where = f" in {stack.wchan}" if stack.wchan else ""
    used = f", {stack.cpu_s:.1f} s of processor time" if stack.cpu_s else ""
    return f"{stack.name} (pid {stack.pid}) {stack.state}{where}{used}\n{stack.text}\n"
