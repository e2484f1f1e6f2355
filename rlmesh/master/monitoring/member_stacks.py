"""Stacks of members' threads: members are asked first, and only silent ones are sent a signal.

The signal makes ``faulthandler`` walk the frames of threads while they run, which can crash a process. It is safe for
members that cannot answer: a member that holds the interpreter lock keeps its other threads still, and a stopped one
does not move. Two kinds of members may be slow and move all the same, and get no signal: one that starts, in an
incident of others; and one that answers a second, small question, and needs longer for the text of its stacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

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
    endpoints = list(dict.fromkeys(member.endpoint for member in asked if member.endpoint))
    answers = await asyncio.gather(*(_ask(runtime, endpoint, own_answer_s) for endpoint in endpoints))
    own = {endpoint: text for endpoint, text in zip(endpoints, answers, strict=True) if text}
    of_node: dict[int, list[Member]] = {}
    for member in asked:
        of_node.setdefault(member.placement.node_rank, []).append(member)
    inspected = await asyncio.gather(
        *(_inspect(agent_of(node), on_it, own, signal=signal) for node, on_it in of_node.items())
    )
    of_key = {stack.key: stack for stacks in inspected for stack in stacks}
    return tuple(of_key[member.key] for member in asked)


async def _ask(runtime: Runtime, endpoint: str, wait_s: float) -> str:
    """Return a process's own answer; empty if it answers nothing."""
    control = runtime.peer(CONTROL, endpoint)
    try:
        await control.options(timeout_s=wait_s).call("methods", "")
    except CallError:
        return ""
    try:
        text: str = await control.options(timeout_s=TEXT_S).call("stacks")
    except CallError as error:
        return f"it answers, but its stacks did not come: {error}"
    return text


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
