"""Loss of a node: its members are restarted on other nodes. No I/O.

::

    lost    the node's members are dead; each role's rule says who is restarted, the planner says where
            without room, they wait for a node up to ``node_wait_s``, then the job fails
    back    the node, or a replacement, is there: members that had no room are placed on it

If the node belongs to a group, the other nodes of the group are left too, and used again when it is back.
"""

from __future__ import annotations

from dataclasses import replace

from rlmesh.job.status import NODE_LOST, ExitInfo, FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import Member, MemberId
from rlmesh.master.decisions.failover import Exhausted, FailoverCoordinator, Restart
from rlmesh.master.decisions.job_state import JobState
from rlmesh.master.decisions.recovery import Recoveries
from rlmesh.master.decisions.replacement import ReplacementPlanner
from rlmesh.placement.node_groups import node_groups

__all__ = ["NodeLosses"]


class NodeLosses:
    """The lost nodes of one job. Methods that return a failure return the one with which the job ends, or None."""

    def __init__(
        self, state: JobState, failover: FailoverCoordinator, placements: ReplacementPlanner, recoveries: Recoveries
    ) -> None:
        self._state, self._saved = state, state.saved
        self._failover, self._placements, self._recoveries = failover, placements, recoveries

    def lost(self, node_rank: int, how: str, now: float) -> FailureInfo | None:
        """Handle the loss of a node, on which nothing of the job runs any more."""
        context = self._state.context
        if node_rank in context.lost_nodes or node_rank not in context.nodes:
            return None
        context.lost_nodes[node_rank] = how
        context.terms[node_rank] = context.terms.get(node_rank, 0) + 1
        self._recoveries.node_lost(node_rank)
        self._state.do(ev.ForgetNode(node_rank))
        affected = [m for m in context.members.values() if m.placement.node_rank == node_rank and not _ended(m)]
        names = ", ".join(member.name for member in affected) or "none"
        what = f"the agent of node {self._state.node_name(node_rank)} {how}; its members ended with it: {names}"
        started = any(member.spawned for member in context.members.values())
        going = self._state.undecided and context.stage in ("starting", "running")
        ends = [(member.id, _exit(member, node_rank, now)) for member in affected if not member.gone]
        for member_id, exit in ends:
            context.members[member_id].exit = exit
            context.members[member_id].enter("failed", now)
        if going and started:
            failure = self._replace(affected + self._set_aside(node_rank), dict(ends), what, now)
        else:
            failure = FailureInfo(what, at=now)
        if context.stage in ("starting", "running"):
            self._state.do(*(ev.AnnounceLoss(exit) for _, exit in ends))
        return failure

    def back(self, node_rank: int, now: float) -> None:
        """Handle the arrival of a node, for the first time or again."""
        context = self._state.context
        context.lost_nodes.pop(node_rank, None)
        context.set_aside = {mate: cause for mate, cause in context.set_aside.items() if cause != node_rank}
        unplaced = self._recoveries.unplaced()
        if unplaced and not isinstance(places := self._placements.places(unplaced, now), FailureInfo):
            self._recoveries.place(places)

    def overdue(self, now: float) -> FailureInfo | None:
        """Return the failure of members that have waited for room for too long; None if there is none."""
        if self._recoveries.unplaced() and self._saved.no_room is not None and now >= self._saved.room_until:
            return self._saved.no_room
        return None

    def _set_aside(self, node_rank: int) -> list[Member]:
        """Set aside the other nodes of a lost node's group; return the members that run there."""
        context = self._state.context
        groups = [ranks for ranks in node_groups(context.nodes.values()) if node_rank in ranks]
        mates = {rank for ranks in groups for rank in ranks if rank not in context.lost_nodes}
        context.set_aside.update(dict.fromkeys(mates, node_rank))
        return [m for m in context.members.values() if m.placement.node_rank in mates and not _ended(m)]

    def _replace(
        self, members: list[Member], ends: dict[MemberId, ExitInfo], what: str, now: float
    ) -> FailureInfo | None:
        """Restart members elsewhere, all of them by one plan."""
        restarts: list[Restart] = []
        for member in members:
            if any(member.id in restart.members for restart in restarts):
                continue
            info = FailureInfo(what, *member.id, at=now, exit=ends.get(member.id), kind=NODE_LOST)
            decision = self._failover.decide(info, self._state.context.restarts, now)
            if isinstance(decision, Exhausted):
                return decision.failure
            if decision is None:
                policy = f"{member.name} is not to be restarted (restart policy never)"
                return FailureInfo(f"{what}. {policy}", at=now, kind=NODE_LOST)
            restarts.append(decision)
        wanted = {member for restart in restarts for member in restart.members}
        places = self._placements.places(wanted, now)
        if isinstance(places, FailureInfo):
            message = f"{what}. {places.message}\n{self._advice()}"
            self._saved.no_room = replace(places, message=message, role=None, rank=None, kind=NODE_LOST)
            self._saved.room_until = now + self._state.limits.node_wait_s
            if self._state.limits.node_wait_s <= 0:
                return self._saved.no_room
        for restart in restarts:
            self._recoveries.begin(restart, None if isinstance(places, FailureInfo) else places, now)
        return None

    def _advice(self) -> str:
        waited = self._state.limits.node_wait_s
        after = f"No node came within {waited:g} s. " if waited > 0 else ""
        return (
            f"{after}Give the job a node more and hold it back with spare_nodes(1), or let it wait for a node with "
            "limits(node_wait_s=…)"
        )


def _ended(member: Member) -> bool:
    """True if the member's process ended before and will not be restarted."""
    return member.gone and member.state != "restarting"


def _exit(member: Member, node_rank: int, now: float) -> ExitInfo:
    return ExitInfo(*member.id, member.incarnation, member.pid, None, 9, now, node_rank, log_path=member.log_path)
