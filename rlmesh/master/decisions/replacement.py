"""New placements for members whose device is bad or whose node must not be used any more. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from rlmesh.errors import PlacementError
from rlmesh.job.status import FailureInfo
from rlmesh.master.context import MemberId
from rlmesh.master.decisions.job_state import JobState
from rlmesh.master.decisions.scheduler import Scheduler
from rlmesh.placement.planner import Placement

__all__ = ["NODE_FAILURES", "NODE_WINDOW_S", "ReplacementPlanner"]

NODE_FAILURES = 3
"""Number of failures that began on a node within the window, from which the node is avoided while there is room
elsewhere."""
NODE_WINDOW_S = 3600.0


class ReplacementPlanner:
    """Bad devices and nodes of one job, and placements without them. Members stay where they are until a restart."""

    def __init__(self, state: JobState, scheduler: Scheduler) -> None:
        self._state = state
        self._scheduler = scheduler

    @property
    def bad_nodes(self) -> set[int]:
        """Return the ranks of lost nodes, and of nodes set aside with them."""
        context = self._state.context
        return {*context.lost_nodes, *context.set_aside}

    def shaky_nodes(self, now: float) -> set[int]:
        """Return the nodes that failed repeatedly. A failure counts once, however many members it ended."""
        failures: dict[int, set[float]] = defaultdict(set)
        for record in self._state.context.restarts:
            if record.failure.exit is not None and record.at > now - NODE_WINDOW_S:
                failures[record.failure.exit.node_rank].add(record.at)
        return {node for node, times in failures.items() if len(times) >= NODE_FAILURES}

    def is_bad(self, placement: Placement) -> bool:
        """True if a member must leave its placement."""
        on_bad = any(share.device.uuid in self._state.saved.bad_devices for share in placement.devices)
        return on_bad or placement.node_rank in self.bad_nodes

    def places(self, members: Collection[MemberId], now: float) -> Mapping[MemberId, Placement] | FailureInfo:
        """Return new placements for members about to be restarted: empty if they can stay, a failure if there is no
        room.

        Members that are not restarted stay, unless their own placement is bad.
        """
        context = self._state.context
        own = [context.members[member] for member in sorted(members)]
        must = [member for member in own if self.is_bad(member.placement)]
        shaky = self.shaky_nodes(now) - self.bad_nodes
        if context.plan is None or not (must or any(member.placement.node_rank in shaky for member in own)):
            return {}
        if shaky and not isinstance(found := self._without(self.bad_nodes | shaky, members), PlacementError):
            return found
        found = self._without(self.bad_nodes, members) if must else {}
        if isinstance(found, PlacementError):
            names = ", ".join(member.name for member in must)
            where = "devices" if len(context.nodes) == 1 else "nodes or devices"
            return FailureInfo(f"{names} cannot be moved to other {where}: {found}", *must[0].id, at=now)
        return found

    def _without(
        self, nodes: Collection[int], members: Collection[MemberId]
    ) -> Mapping[MemberId, Placement] | PlacementError:
        context, wanted = self._state.context, set(members)
        pinned = [m.placement for m in context.members.values() if m.id not in wanted and not self.is_bad(m.placement)]
        spares = max(0, self._state.spec.demand.spare_nodes - len(nodes))
        try:
            new = self._scheduler.plan(
                context.nodes.values(), pinned=pinned, excluded_nodes=nodes,
                excluded_devices=self._state.saved.bad_devices, spare_nodes=spares,
            )  # fmt: skip
        except PlacementError as error:
            return error
        return {(p.role, p.rank): p for p in new.placements if (p.role, p.rank) in wanted}
