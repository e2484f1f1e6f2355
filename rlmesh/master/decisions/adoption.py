"""What a master that was started again makes of what it finds: decided from the state that it read. Pure.

The members never stopped. Some of what the master before it ordered may not have been carried out, and some news may
be on its way: outboxes hold it. So everything is said once more that may have been lost and does no harm twice, and
each agent's list of what runs on its node is compared with what should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlmesh.agent.protocol import MemberProcess
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.stop_together import StopTogether


def say_again(context: JobContext, together: StopTogether) -> Iterator[ev.Action]:
    """For the members that are there: the addresses, who has ended, and what they were told to do."""
    if not context.members:
        return
    yield ev.PublishBook(context.new_book())
    for member in context.members.values():
        if member.exit is not None and context.stage in ("starting", "running"):
            yield ev.AnnounceLoss(member.exit)
        elif not member.gone and member.endpoint:
            yield from _told(context, member, together)
    yield from together.say_again()


def _told(context: JobContext, member: Member, together: StopTogether) -> Iterator[ev.Action]:
    if member.state == "stopping" and (member.ended_by_us or member.in_run):
        yield ev.AskToStop((member.id,), context.note or "the job ends", ends=member.ended_by_us)
    if member.state == "stopping" and not member.ended_by_us:
        yield ev.Teardown(member.id, together.last_word())
    elif context.stage == "running" and member.state == "ready" and member.has_run is None:
        yield ev.BeginRun(member.id)


def unseen(context: JobContext, node_rank: int, running: Sequence[MemberProcess]) -> tuple[MemberProcess, ...]:
    """Members that should run on a node, that its agent did not name, and of whose end no news is on its way.

    One whose start was ordered and that was never seen is none of them: the order is carried out once more.
    """
    there = {(process.role, process.rank, process.incarnation) for process in running}
    return tuple(
        MemberProcess(*member.id, member.incarnation, member.pid)
        for member in context.members.values()
        if member.placement.node_rank == node_rank
        and not member.gone
        and (*member.id, member.incarnation) not in there
        and (member.state != "starting" or member.pid)
    )


def strays(context: JobContext, node_rank: int, running: Sequence[MemberProcess]) -> tuple[ev.ProcessKey, ...]:
    """Processes on a node that are no member of the job as it is now: they must end."""

    def belongs(process: MemberProcess) -> bool:
        member = context.members.get((process.role, process.rank))
        return (
            member is not None
            and member.incarnation == process.incarnation
            and member.placement.node_rank == node_rank
            and member.exit is None
        )

    return tuple((p.role, p.rank, p.incarnation) for p in running if not belongs(p))
