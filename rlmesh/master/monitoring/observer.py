"""What the master remembers of a job for those who look at it: the graph of calls, the events, the incidents.

It sees every event after the job manager has handled it, and changes nothing that the job manager decides on: the
graph and the list of incidents in the job's context are its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh import private_files
from rlmesh.agent.monitoring.rejections import RejectionReporter, RejectionSums
from rlmesh.agent.protocol import AGENT, CONTROL
from rlmesh.errors import CallError, UsageError
from rlmesh.job.status import EdgeStats
from rlmesh.master import events as ev
from rlmesh.master.chaos import Chaos
from rlmesh.master.chaos_plan import check_method, parse_kills
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.job_state import SERVING
from rlmesh.master.job_manager import JobManager
from rlmesh.master.monitoring.incident_keeper import IncidentKeeper
from rlmesh.observe.files.event_log import EventLog, entry_of
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process.clock import epoch
from rlmesh.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rlmesh.agent.monitoring.usage import NodeUse
    from rlmesh.observe.prometheus.endpoint import ScrapeServer

__all__ = ["Observer"]

logger = logging.getLogger(__name__)


USAGE_S = 1.0
METHODS_S = 2.0
"""How long a scrape waits for a node."""
METRICS_ADDRESS = "metrics.address"
"""In the run directory: where the metrics are, since the port may have been left to the system."""
_UNTOLD = (ev.Tick, ev.Reported, ev.PublishBook)
"""Too many, and told elsewhere."""


class Observer:
    """For one job; it watches from its making on.

    Args:
        manager: of the job.
        runtime: to ask members.
        clock: the job's time.
        doing: what a member does that its state does not say.
    """

    def __init__(
        self, manager: JobManager, runtime: Runtime, clock: Callable[[], float], doing: Callable[[Member], str]
    ) -> None:
        self._manager, self._runtime, self._clock = manager, runtime, clock
        self._log = EventLog(Path(manager.context.spec.run_dir))
        self._incidents = IncidentKeeper(manager.context, self._log, self._ask_stacks, doing)
        self._stage = manager.context.stage
        spec = manager.context.spec
        self._sizes = {role.name: role.members for role in spec.roles}
        self._chaos = Chaos(manager.context, runtime, parse_kills(spec.observe.chaos, self._sizes), clock)
        self._server: ScrapeServer | None = None
        self.rejections = RejectionSums()
        self._own_rejections = RejectionReporter(runtime, partial(self.rejections.take, "master"))
        manager.watcher = self.saw

    def observed(self, caller: str, edges: tuple[EdgeStats, ...]) -> None:
        """A member says whom it called."""
        draw(self._manager.context)
        self._manager.context.graph.observe(caller, edges, epoch())

    async def rehearse(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Kill these when their moments come; returns them with their ranks.

        Raises:
            UsageError: one of them cannot be.
        """
        kills = parse_kills(texts, self._sizes)
        for kill in kills:
            if kill.point == "call" and (methods := await self._methods_of(kill.role)):
                check_method(kill, methods)
        self._chaos.add(kills)
        return tuple(map(str, kills))

    async def _methods_of(self, role: str) -> tuple[str, ...]:
        """What the members of a role export; empty if none serves yet, or none answers."""
        for member in self._manager.context.members.values():
            if member.id[0] == role and member.endpoint and member.state in SERVING:
                control = self._runtime.peer(CONTROL, member.endpoint).options(timeout_s=METHODS_S)
                try:
                    return tuple(await control.call("methods", member.name))
                except CallError:
                    return ()
        return ()

    def rehearsed(self) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        """The kills that happened, those that did not yet, and those that never will, with why."""
        return tuple(self._chaos.done), tuple(map(str, self._chaos.left)), dict(self._chaos.cannot)

    def cannot_reach(self, kill: str, why: str) -> None:
        """A member has no such method as a kill waits for."""
        if self._chaos.drop(kill, why):
            self._manager.context.note = f"the rehearsal {kill} cannot happen: {why}"

    async def reached(self, kill: str) -> None:
        """A member has come to the call at which somebody is to be killed."""
        await self._chaos.reached(kill)

    def saw(self, event: ev.Event, actions: Sequence[ev.Action], now: float) -> None:
        """An event was handled. Never raises: a fault here must not touch the job."""
        try:
            self._saw(event, actions, now)
        except Exception:
            logger.exception("a job's event could not be noted")

    def _saw(self, event: ev.Event, actions: Sequence[ev.Action], now: float) -> None:
        context = self._manager.context
        shown_at = context.shown(now)
        for item in (event, *actions):
            if not isinstance(item, _UNTOLD):
                self._log.add(entry_of(item, shown_at))
        if context.stage != self._stage:
            self._log.add({"at": round(shown_at, 6), "event": "Stage", "before": self._stage, "now": context.stage})
            self._stage = context.stage
        draw(context)
        if isinstance(event, ev.MemberBound) and context.spec.observe.timeline:
            self._runtime.peer(CONTROL, event.endpoint, incarnation=event.incarnation).notify("note_calls")
        if isinstance(event, ev.MemberExited):
            self._incidents.exited(event.exit, shown_at)
        self._incidents.look(shown_at)
        self._chaos.saw(event, actions, now)

    async def open(self) -> None:
        """Serve metrics, if the job asks for it. An address that cannot be had is told, and the job goes on."""
        self._own_rejections.start()
        spec = self._manager.context.spec
        if not spec.observe.metrics:
            return
        from rlmesh.observe.prometheus.endpoint import ScrapeServer, parse_address

        server = ScrapeServer(self._metrics)
        try:
            where = await server.start(parse_address(spec.observe.metrics))
        except (OSError, UsageError) as error:
            logger.warning("metrics cannot be served at %s: %s", spec.observe.metrics, error)
            return
        self._server = server
        logger.info("metrics: %s", where)
        try:
            private_files.write_whole(Path(spec.run_dir) / METRICS_ADDRESS, where + "\n", durable=False)
        except OSError as error:
            logger.warning("%s is not written: %s", METRICS_ADDRESS, error)

    async def _metrics(self) -> str:
        context = self._manager.context
        uses = await asyncio.gather(*map(self._usage, context.nodes.values()))
        known = {node: use for node, use in zip(context.nodes, uses, strict=True) if use is not None}
        self._own_rejections.flush()
        from rlmesh.master.monitoring.metrics_page import families, rejections
        from rlmesh.observe.prometheus.exposition import exposition

        return exposition([*families(context, known, self._clock()), rejections(self.rejections.by_process())])

    async def _usage(self, node: NodeInfo) -> NodeUse | None:
        agent = self._runtime.peer(AGENT, node.agent_endpoint).options(timeout_s=USAGE_S)
        try:
            use: NodeUse = await agent.call("usage")
        except CallError:
            return None
        return use

    async def _ask_stacks(self, member: Member) -> str:
        from rlmesh.master.monitoring.member_stacks import INCIDENT_ANSWER_S, examine, stack_text

        (stack,) = await examine(self._runtime, [member], self._agent, INCIDENT_ANSWER_S)
        return stack_text(stack)

    def _agent(self, node_rank: int) -> MemberHandle:
        return self._runtime.peer(AGENT, self._manager.context.nodes[node_rank].agent_endpoint)

    async def close(self) -> None:
        await self._incidents.close(self._manager.context.shown(self._clock()))
        await self._chaos.close()
        if self._server is not None:
            await self._server.close()
        self._log.close()


def draw(context: JobContext) -> None:
    """Put into the graph what the job declares, once it is placed."""
    graph = context.graph
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
