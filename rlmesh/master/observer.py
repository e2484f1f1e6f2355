"""What the master remembers of a job for those who look at it: the graph of calls.

It sees every event after the job manager has handled it, and changes nothing that the job manager decides on.
"""

from __future__ import annotations

from collections.abc import Callable

from rlmesh.job.status import EdgeStats
from rlmesh.master.context import JobContext

__all__ = ["Observer"]


class Observer:
    """For one job.

    Args:
        context: of the job; its ``graph`` is kept up here.
        clock: seconds since the epoch.
    """

    def __init__(self, context: JobContext, clock: Callable[[], float]) -> None:
        self._context = context
        self._clock = clock

    def observed(self, caller: str, edges: tuple[EdgeStats, ...]) -> None:
        """A member says whom it called."""
        self._draw()
        self._context.graph.observe(caller, edges, self._clock())

    def _draw(self) -> None:
        """Put into the graph what the job declares, once it is placed."""
        context, graph = self._context, self._context.graph
        if graph.members or context.plan is None:
            return
        on_device: dict[tuple[int, str], list[str]] = {}
        for placement in context.plan.placements:
            graph.add_member(placement.role, placement.rank)
            for share in placement.devices:
                name = f"{placement.role}:{placement.rank}"
                on_device.setdefault((placement.node_rank, share.device.uuid), []).append(name)
        for role in context.spec.roles:
            if role.backend == "elastic" and role.members > 1:
                graph.declare_group(role.name)
            for callee in role.calls:
                graph.declare(role.name, callee)
        for members in on_device.values():
            graph.declare_collocation(members)
