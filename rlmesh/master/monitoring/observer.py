"""Observation of a job for people: the call graph, the event log, the incidents.

The observer gets every event after the job manager has handled it, and changes nothing on which the job manager's
decisions depend. In the job's context, only the graph and the list of incidents are the observer's to change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh import private_files
from rlmesh.agent.monitoring.rejections import RejectionReporter, RejectionSums
from rlmesh.agent.protocol import AGENT, CONTROL
from rlmesh.errors import CallError, UsageError
from rlmesh.job.status import SERVING, EdgeStats
from rlmesh.master import events as ev
from rlmesh.master.chaos import Chaos
from rlmesh.master.chaos_plan import check_method, parse_kills
from rlmesh.master.context import JobContext, Member
from rlmesh.master.job_manager import JobManager
from rlmesh.master.monitoring.incident_keeper import IncidentKeeper
from rlmesh.observe.files.event_log import EventLog, entry_of
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process.clock import epoch
from rlmesh.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rlmesh.agent.monitoring.usage import NodeUse
    from rlmesh.observe.prometheus import ScrapeServer

__all__ = ["Observer"]

logger = logging.getLogger(__name__)


QUIET_S = 0.1
"""Seconds after the last member is there until what a failure needs is imported: an import during a failure would delay
the news of it."""
USAGE_S = 1.0
METHODS_S = 2.0
"""Seconds that a scrape waits for a node."""
METRICS_ADDRESS = "metrics.address"
"""File in the run directory with the address of the metrics, since the system may have chosen the port."""
_NOT_LOGGED = (ev.Tick, ev.Reported, ev.PublishBook)
"""Events and actions that are too frequent for the log, and recorded elsewhere."""


class Observer:
    """Observes one job from its construction on.

    Args:
        manager: the job's manager.
        runtime: connects to members.
        clock: the job's time.
        doing: returns what a member is doing that its state does not show.
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
        self.chaos = Chaos(manager.context, runtime, parse_kills(spec.observe.chaos, self._sizes), clock)
        self._server: ScrapeServer | None = None
        self.rejections = RejectionSums()
        self._own_rejections = RejectionReporter(runtime, partial(self.rejections.take, "master"))
        manager.watcher = self.handled

    def observed(self, caller: str, edges: tuple[EdgeStats, ...]) -> None:
        """Record the calls that a member made."""
        draw(self._manager.context)
        self._manager.context.graph.observe(caller, edges, epoch())

    async def rehearse(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Plan kills; return them with drawn ranks.

        Raises:
            UsageError: a kill is not possible.
        """
        kills = parse_kills(texts, self._sizes)
        for kill in kills:
            if kill.point == "call" and (methods := await self._methods_of(kill.role)):
                check_method(kill, methods)
        self.chaos.add(kills)
        return tuple(map(str, kills))

    async def _methods_of(self, role: str) -> tuple[str, ...]:
        """Return the methods that the members of a role export; empty if no member answers."""
        for member in self._manager.context.members.values():
            if member.id[0] == role and member.endpoint and member.state in SERVING:
                control = self._runtime.peer(CONTROL, member.endpoint).options(timeout_s=METHODS_S)
                try:
                    return tuple(await control.call("methods", member.name))
                except CallError:
                    return ()
        return ()

    def rehearsed(self) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        """Return the kills that happened, those still to come, and those that cannot happen, with the reason."""
        return tuple(self.chaos.done), tuple(map(str, self.chaos.planned)), dict(self.chaos.cannot)

    def cannot_reach(self, kill: str, why: str) -> None:
        """Drop a kill that waits for a method which a member does not have."""
        if self.chaos.drop(kill, why):
            self._manager.context.note = f"the rehearsal {kill} cannot happen: {why}"

    def handled(self, event: ev.Event, actions: Sequence[ev.Action], now: float) -> None:
        """Record a handled event. Never raises: a fault here must not affect the job."""
        try:
            self._handle(event, actions, now)
        except Exception:
            logger.exception("a job's event could not be noted")

    def _handle(self, event: ev.Event, actions: Sequence[ev.Action], now: float) -> None:
        context = self._manager.context
        shown_at = context.shown(now)
        for item in (event, *actions):
            if not isinstance(item, _NOT_LOGGED):
                self._log.add(entry_of(item, shown_at))
        if context.stage != self._stage:
            self._log.add({"at": round(shown_at, 6), "event": "Stage", "before": self._stage, "now": context.stage})
            self._stage = context.stage
            if context.stage == "running":
                asyncio.get_running_loop().call_later(QUIET_S, _load_stacks)
        draw(context)
        if isinstance(event, ev.MemberBound) and context.spec.observe.timeline:
            self._runtime.peer(CONTROL, event.endpoint, incarnation=event.incarnation).notify("note_calls")
        if isinstance(event, ev.MemberExited):
            self._incidents.exited(event.exit, shown_at)
        self._incidents.update(shown_at)
        self.chaos.handled(event, actions, now)

    async def open(self) -> None:
        """Serve metrics if the job asks for it. If the address cannot be used, a warning is logged and the job goes
        on."""
        self._own_rejections.start()
        spec = self._manager.context.spec
        if not spec.observe.metrics:
            return
        from rlmesh.observe.prometheus import ScrapeServer, parse_address

        server = ScrapeServer(self._metrics_page())
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

    def _metrics_page(self) -> Callable[[], Awaitable[str]]:
        """A function that creates the metrics page. Loads prometheus_client, which other jobs do not need."""
        from rlmesh.master.monitoring.metrics_page import families, page_text, rejections

        async def page() -> str:
            context = self._manager.context
            uses = await asyncio.gather(*map(self._usage, context.nodes.values()))
            known = {node: use for node, use in zip(context.nodes, uses, strict=True) if use is not None}
            self._own_rejections.flush()
            return page_text([*families(context, known, self._clock()), rejections(self.rejections.by_process())])

        return page

    async def _usage(self, node: NodeInfo) -> NodeUse | None:
        agent = self._runtime.peer(AGENT, node.agent_endpoint).options(timeout_s=USAGE_S)
        try:
            use: NodeUse = await agent.call("usage")
        except CallError:
            return None
        return use

    async def _ask_stacks(self, member: Member) -> str:
        from rlmesh.master.monitoring.member_stacks import INCIDENT_ANSWER_S, examine, stack_text

        starting = member.state in ("starting", "bound")
        (stack,) = await examine(self._runtime, [member], self._agent, INCIDENT_ANSWER_S, signal=not starting)
        if starting and not stack.text:
            stack = replace(stack, text=f"starts, and did not answer within {INCIDENT_ANSWER_S:g} s")
        return stack_text(stack)

    def _agent(self, node_rank: int) -> MemberHandle:
        return self._runtime.peer(AGENT, self._manager.context.nodes[node_rank].agent_endpoint)

    async def close(self) -> None:
        await self._incidents.close(self._manager.context.shown(self._clock()))
        await self.chaos.close()
        if self._server is not None:
            await self._server.close()
        self._log.close()


def _load_stacks() -> None:
    import rlmesh.master.monitoring.member_stacks  # noqa: F401


def draw(context: JobContext) -> None:
    """Add the job's declarations to the graph, once its members are placed."""
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
