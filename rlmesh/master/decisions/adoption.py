"""Reconciliation after a restart of the master: which orders to repeat, and which processes to end or to check. No I/O.

The members kept running. Some orders of the previous master may not have been carried out, and reports from outboxes
may still arrive. So every order that may be lost and is idempotent is repeated, and each agent's list of running
processes is compared with the members that should run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlmesh.agent.protocol import MemberProcess
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.job_state import Recovery
from rlmesh.master.decisions.stop_together import StopTogether


def repeated_orders(context: JobContext, stop: StopTogether) -> Iterator[ev.Action]:
    """Yield the orders that members may have missed: addresses, deaths, stops, teardowns and starts of ``run()``."""
    if not context.members:
        return
    yield ev.PublishBook(context.new_book())
    for member in context.members.values():
        if member.exit is not None and context.stage in ("starting", "running"):
            yield ev.AnnounceLoss(member.exit)
        elif not member.gone and member.endpoint:
            yield from _member_orders(context, member, stop)
    yield from stop.repeated_orders()


def _member_orders(context: JobContext, member: Member, stop: StopTogether) -> Iterator[ev.Action]:
    if member.state == "stopping" and (member.ended_by_us or member.in_run):
        yield ev.AskToStop((member.id,), context.note or "the job ends", ends=member.ended_by_us)
    if member.state == "stopping" and not member.ended_by_us:
        yield ev.Teardown(member.id, stop.final_request())
    elif context.stage == "running" and member.state == "ready" and member.has_run is None:
        yield ev.BeginRun(member.id)


def unreported(
    context: JobContext, recoveries: Iterable[Recovery], node_rank: int, running: Sequence[MemberProcess]
) -> tuple[MemberProcess, ...]:
    """Return members that should run on a node, that its agent did not list, and whose exit has not been reported; also
    those that are being replaced, whose start may have been ordered and never carried out.

    A current member whose start was ordered but never confirmed is left out: the order is repeated instead.
    """
    there = {(process.role, process.rank, process.incarnation) for process in running}
    replaced = [key for recovery in recoveries for key, node in recovery.outgoing.items() if node == node_rank]
    return tuple(MemberProcess(*key, 0) for key in replaced if key not in there) + tuple(
        MemberProcess(*member.id, member.incarnation, member.pid)
        for member in context.members.values()
        if member.placement.node_rank == node_rank
        and not member.gone
        and (*member.id, member.incarnation) not in there
        and (member.state != "starting" or member.pid)
    )


def strays(context: JobContext, node_rank: int, running: Sequence[MemberProcess]) -> tuple[ev.ProcessKey, ...]:
    """Return the processes on a node that are not current members of the job and must end."""

    def belongs(process: MemberProcess) -> bool:
        member = context.members.get((process.role, process.rank))
        return (
            member is not None
            and member.incarnation == process.incarnation
            and member.placement.node_rank == node_rank
            and member.exit is None
        )

    return tuple((p.role, p.rank, p.incarnation) for p in running if not belongs(p))
