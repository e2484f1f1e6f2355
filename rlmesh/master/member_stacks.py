"""The Python stacks of a member that is up: asked of itself, or else written by a signal."""

from __future__ import annotations

from collections.abc import Iterable

from rlmesh.agent.protocol import CONTROL
from rlmesh.errors import CallError
from rlmesh.job.status import MemberStack
from rlmesh.master.context import Member
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime

__all__ = ["member_stacks", "stacks_text"]

OWN_ANSWER_S = 0.7
"""A member that holds the interpreter's lock in C does not answer within this time."""
SIGNAL_ANSWER_S = 8.0


async def member_stacks(runtime: Runtime, member: Member, agent: MemberHandle) -> str:
    """What each of its threads does; of one that does not answer, by its agent.

    A signal makes ``faulthandler`` walk the frames of threads while they run, which crashes a process now and then. So
    it is for members only that cannot answer: whoever holds the interpreter's lock keeps all other threads still.

    Raises:
        CallError: its agent does not answer either.
    """
    if member.endpoint:
        try:
            text: str = await runtime.peer(CONTROL, member.endpoint).options(timeout_s=OWN_ANSWER_S).call("stacks")
            return text
        except CallError:
            pass
    found = await agent.options(timeout_s=SIGNAL_ANSWER_S).call("examine", (member.key,))
    return stacks_text(found) if found else "it has ended"


def stacks_text(stacks: Iterable[MemberStack]) -> str:
    """For people: each member with its process's state, then its threads."""
    parts = []
    for stack in stacks:
        where = f" in {stack.wchan}" if stack.wchan else ""
        head = (
            f"{stack.role}:{stack.rank} (pid {stack.pid}) {stack.state}{where}, {stack.cpu_s:.1f} s of processor time"
        )
        parts.append(f"=== {head} ===\n{stack.text}\n")
    return "\n".join(parts)
