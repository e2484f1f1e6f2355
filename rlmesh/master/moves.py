"""New places for members whose device is bad or whose node must not be used any more. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlmesh.errors import PlacementError
from rlmesh.job.status import FailureInfo
from rlmesh.master.context import MemberId
from rlmesh.master.job_state import JobState
from rlmesh.master.scheduler import Scheduler
from rlmesh.placement.planner import Placement

__all__ = ["Moves"]


class Moves:
    """What one job must not use any more. Members stay where they are until they are restarted."""

    def __init__(self, state: JobState, scheduler: Scheduler) -> None:
        self._state = state
        self._scheduler = scheduler
        self.bad_nodes: set[int] = set()
        self.bad_devices: set[str] = set()

    def is_bad(self, placement: Placement) -> bool:
        """Whether a member must leave its place."""
        on_bad = any(share.device.uuid in self.bad_devices for share in placement.devices)
        return on_bad or placement.node_rank in self.bad_nodes

    def places(self, members: Collection[MemberId], now: float) -> Mapping[MemberId, Placement] | FailureInfo:
        """Where members go that are about to be restarted; empty if they can stay, a failure if there is no room.

        Members that are not restarted stay, as far as their own place is good.
        """
        context = self._state.context
        plan = context.plan
        wanted = set(members)
        leaving = [m for m in context.members.values() if m.id in wanted and self.is_bad(m.placement)]
        if plan is None or not leaving:
            return {}
        kept = [m.placement for m in context.members.values() if m.id not in wanted and not self.is_bad(m.placement)]
        spares = max(0, self._state.spec.demand.spare_nodes - len(self.bad_nodes))
        try:
            new = self._scheduler.plan(
                context.nodes.values(), kept=kept, excluded_nodes=self.bad_nodes, excluded_devices=self.bad_devices,
                spare_nodes=spares,
            )  # fmt: skip
        except PlacementError as error:
            names = ", ".join(member.name for member in leaving)
            return FailureInfo(f"{names} cannot be moved to other devices: {error}", *leaving[0].id, at=now)
        return {(p.role, p.rank): p for p in new.placements if (p.role, p.rank) in wanted}
