"""The master's process: ``python -m rlmesh.master.prime_master PID``, with the configuration of the agent that has
this process number on its standard input.

``PrimeMaster`` is the I/O shell around ``JobManager``: it turns calls of agents, workers and the driver into
events, and lets ``Executor`` carry out the actions. Calls between members never pass through it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import private_files
from rlmesh.agent.monitoring.logs import last_lines
from rlmesh.agent.monitoring.out_of_memory import end_tasks_without_memory
from rlmesh.agent.monitoring.own_logs import log_to_standard_error
from rlmesh.agent.node_description import machine_id
from rlmesh.agent.node_start import decode_config
from rlmesh.agent.processes import ownership
from rlmesh.agent.protocol import (
    MASTER,
    STATE_REFUSED,
    AgentConfig,
    CallOrigin,
    Grant,
    MemberHello,
    MemberProcess,
    public_address,
)
from rlmesh.errors import CallError
from rlmesh.job.masking import register_secrets, secrets_in
from rlmesh.job.status import Alarm, EdgeStats, ExitInfo, JobStatus, MemberWaits, MetricRecord, Serving
from rlmesh.master import events as ev
from rlmesh.master.context import Member
from rlmesh.master.decisions.scheduler import Scheduler, Site
from rlmesh.master.event_loop import EventLoop
from rlmesh.master.executor import Executor
from rlmesh.master.job_manager import JobManager
from rlmesh.master.jobspec import (
    AGENT_PIDS,
    MASTER_PID,
    MASTER_PUBLIC,
    MASTERS,
    REJECTED,
    STORE_TROUBLE,
    WANTED_NODES,
    JobSpec,
)
from rlmesh.master.monitoring.activity import Activities, ActivityPoller
from rlmesh.master.monitoring.agent_watch import AgentWatch
from rlmesh.master.monitoring.observer import Observer
from rlmesh.master.monitoring.subscribers import Subscribers, why_ends
from rlmesh.master.state.persistence import Persistence
from rlmesh.master.state.schema import SchemaError
from rlmesh.master.state.snapshot import Snapshot, stored_fact
from rlmesh.master.state.store import STORE_FILE, Stored, StoreRefused
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process.clock import RunningTime, epoch
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rlmesh.master.monitoring.wait_circles import CircleWatch
    from rlmesh.runtime.connections.joining import MembershipUpdate
    from rlmesh.runtime.serving.wait_report import BlockedCalls

logger = logging.getLogger(__name__)

TICK_S = 0.1
SUSPENDED_S = 2.0
"""Duration of one round from which the master counts as suspended; a slow disk may hold it up for half of this."""
MOST_CALLS = 1 << 14
"""Maximum number of concurrent calls of agents and workers; each waits until its message is saved."""
GOODBYE_WAIT_S = 30.0
"""Seconds for which the master answers the driver after the end of the job."""


OutboxItem = MetricRecord | Alarm | ExitInfo
"""Messages that agents and workers send through their outboxes."""


def _event_of(item: OutboxItem) -> ev.Event:
    match item:
        case MetricRecord():
            return ev.Reported(item)
        case Alarm():
            return ev.AlarmRaised(item)
    return ev.MemberExited(item.node_rank, item)


class PrimeMaster:
    """The RPC service of one job's master, served as ``@master``.

    Args:
        config: configuration of the agent that started this process.
        spec: the job.
        runtime: an embedded runtime, bound to the master's endpoint.
        persistence: store of the job's state.
        stored: state that a previous master left there.
        clock: seconds since the epoch, without jumps (`rlmesh.runtime.process.clock.epoch`).
    """

    def __init__(
        self, config: AgentConfig, spec: JobSpec, runtime: Runtime, persistence: Persistence, stored: Stored, *,
        clock: Callable[[], float] = epoch,
    ) -> None:  # fmt: skip
        scheduler = Scheduler(spec, Site(config.key_hex, config.master_endpoint))
        # The job's time, which all limits count in: without the time in which this process was suspended.
        self._clock = RunningTime(clock, SUSPENDED_S, on_suspended=self._was_suspended)
        now = self._clock()
        snapshot = Snapshot.of_rows(stored, spec, now)
        self.manager = JobManager(
            spec, scheduler, now, last_lines, context=snapshot.context, decisions=snapshot.decisions
        )  # fmt: skip
        self._public = runtime.public_endpoint or ""
        self._lease_s = config.lease_s
        self._events = EventLoop(self.manager, persistence, snapshot, self._perform, self._clock)
        self._clock.lost_s += sum(seconds for _, seconds in self.manager.context.standstills)
        self._executor = Executor(runtime, self.manager, scheduler, self._events.post, self._events.carried_out)
        self._subscribers = Subscribers(spec)
        self._watch = AgentWatch(
            spec.job_id, lambda node_rank, how: self._events.post(ev.AgentLost(node_rank, how)), self._pids_on,
            lease_s=config.lease_s,
        )  # fmt: skip
        self._goodbye = asyncio.Event()
        self._job_over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._stage = self.manager.context.stage
        self.manager.context.master_public = self._public
        self._circles: CircleWatch | None = None
        self._activities = Activities()
        self._activity_poller = ActivityPoller(self._activities, self._agents_with_members)
        self._executor.doing = self.manager.activity_of = self._activity_of
        self._observer = Observer(self.manager, runtime, self._clock, self._last_activity_of)

    async def serve(self) -> None:
        """Run the job until the driver said goodbye, or for ``GOODBYE_WAIT_S`` after its end."""
        ended_at: float | None = None
        await self._observer.open()
        self._activity_poller.start()
        try:
            if self._events.masters > 1:
                logger.info("this is master %d of the job; it goes on where the last one was", self._events.masters)
                self._watch.expect(self.manager.context.nodes.values())
                self._events.reissue()
                self._events.post(ev.MasterReturned(self._events.masters))
            while not self._goodbye.is_set():
                await self._events.turn(TICK_S)
                self._watch.check()
                self._log_stage()
                if self.manager.ended and ended_at is None:
                    ended_at = self._clock()
                if ended_at is not None and self._clock() - ended_at > GOODBYE_WAIT_S:
                    logger.warning("the driver did not say goodbye within %g s", GOODBYE_WAIT_S)
                    break
            self._job_over.set_result(True)
            await asyncio.sleep(0)
        finally:
            await self._close()

    def _was_suspended(self, at: float, seconds: float) -> None:
        logger.warning("this process stood still for %.1f s, which count for no limit of the job", seconds)
        self.manager.context.standstills += ((at, seconds),)

    def _perform(self, orders: Iterable[tuple[int, ev.Action]]) -> None:
        orders = list(orders)
        self._executor.perform(orders)
        self._subscribers.note((action for _, action in orders), why_ends(self.manager.context))

    def _log_stage(self) -> None:
        before, self._stage = self._stage, self.manager.context.stage
        if self._stage != before:
            logger.info("job %s: %s → %s", self.manager.context.spec.job_name, before, self._stage)
            for failure in self.manager.context.failures:
                logger.info("failure: %s", failure.message)

    def _pids_on(self, node_rank: int) -> list[int]:
        members = self.manager.context.members.values()
        return [member.pid for member in members if member.placement.node_rank == node_rank and not member.gone]

    def _agents_with_members(self) -> list[tuple[MemberHandle, list[tuple[str, int, int]]]]:
        """Return the agents, each with the members whose processes may run on its node."""
        of_node: dict[int, list[tuple[str, int, int]]] = {}
        for member in self.manager.context.members.values():
            if member.pid and not member.gone:
                of_node.setdefault(member.placement.node_rank, []).append(member.key)
        nodes = self.manager.context.nodes
        return [(self._executor.agent(node), keys) for node, keys in of_node.items() if node in nodes]

    def _activity_of(self, member: Member) -> str:
        return self._activities.of(member.key, time.monotonic())

    def _last_activity_of(self, member: Member) -> str:
        """Return what a member is doing, or was doing in its previous process."""
        role, rank, incarnation = member.key
        now = time.monotonic()
        return self._activities.of(member.key, now) or self._activities.of((role, rank, incarnation - 1), now)

    async def _close(self) -> None:
        await self._activity_poller.close()
        await self._watch.close()
        await self._observer.close()
        await self._executor.close()
        await self._events.close()

    # Called by agents

    @rpc(concurrent=MOST_CALLS)
    async def register_agent(self, node: NodeInfo, sender: str, running: tuple[MemberProcess, ...]) -> Grant:
        """Register an agent. A node that was given up is accepted again when none of its members runs any more. An
        agent in whose place another one has come is not, and that one waits until nothing of the other one can run:
        two would run the same members."""
        may = self._watch.may_register(node.node_rank, sender, runs=bool(running))
        if not may or (running and self._is_given_up(node.node_rank)):
            return Grant(0.0)
        self._watch.registered(node, sender)
        await self._events.post_and_save(ev.AgentRegistered(node, running))
        return self._grant(node.node_rank)

    @rpc(concurrent=MOST_CALLS)
    async def renew(self, node_rank: int, sender: str) -> Grant:
        """Renew an agent's lease."""
        if not self._watch.has_node(node_rank, sender) or self._is_given_up(node_rank):
            return Grant(0.0)
        self._watch.renew(node_rank)
        return self._grant(node_rank)

    def _is_given_up(self, node_rank: int) -> bool:
        return node_rank in self.manager.context.lost_nodes or self._watch.is_given_up(node_rank)

    def _grant(self, node_rank: int) -> Grant:
        return Grant(self._lease_s, self.manager.context.terms.get(node_rank, 0))

    @rpc(concurrent=MOST_CALLS)
    async def attend(self, sender: str, wait_s: float) -> bool:
        """Answer True when the job is over, False after ``wait_s``; a caller whose call fails has lost its master."""
        await asyncio.wait([self._job_over], timeout=wait_s)
        return self._job_over.done()

    @rpc(concurrent=MOST_CALLS)
    async def deliver(self, sender: str, first: int, items: tuple[OutboxItem, ...]) -> int:
        """Take messages of an agent or a worker, each once; returns when they are saved."""
        return await self._events.deliver(sender, first, [_event_of(item) for item in items])

    @rpc
    async def device_failed(self, node_rank: int, uuid: str, what: str) -> None:
        await self._events.post_and_save(ev.DeviceFailed(node_rank, uuid, what))

    # Called by workers

    @rpc(concurrent=MOST_CALLS)
    async def register_member(self, hello: MemberHello) -> None:
        await self._events.post_and_save(
            ev.MemberBound(hello.role, hello.rank, hello.incarnation, hello.pid, hello.endpoint, hello.public)
        )

    @rpc(concurrent=MOST_CALLS)
    async def member_ready(self, role: str, rank: int, incarnation: int, restored: int | None = None) -> None:
        await self._events.post_and_save(ev.MemberReady(role, rank, incarnation, restored))

    @rpc(concurrent=MOST_CALLS)
    async def member_failed(
        self, role: str, rank: int, incarnation: int, exc: Exception, tb: str, origin: CallOrigin | None = None
    ) -> None:
        """Report that a member's own code raised. ``origin``: the exception came out of calls to others."""
        text = f"{type(exc).__name__}: {exc}"
        from_call, blames, lost = origin or CallOrigin(isinstance(exc, CallError))
        await self._events.post_and_save(ev.MemberFailed(role, rank, incarnation, text, tb, from_call, blames, lost))

    @rpc(concurrent=MOST_CALLS)
    async def run_finished(self, role: str, rank: int, incarnation: int) -> None:
        await self._events.post_and_save(ev.RunFinished(role, rank, incarnation))

    @rpc(concurrent=MOST_CALLS)
    async def stopping_at(self, role: str, rank: int, incarnation: int, step: int) -> None:
        await self._events.post_and_save(ev.StoppedAt(role, rank, incarnation, step))

    @rpc
    async def observed(self, caller: str, edges: tuple[EdgeStats, ...]) -> None:
        """Report the calls that a member made since its last report."""
        self._observer.observed(caller, edges)

    @rpc
    async def blocked(self, process: str, incarnation: int, waits: BlockedCalls) -> None:
        """Report what waits in a process of members, and what is queued behind it."""
        from rlmesh.master.monitoring.wait_circles import CircleWatch

        self._circles = self._circles or CircleWatch()
        members = self.manager.context.members.values()
        self._circles.keep({member.name: member.incarnation for member in members if not member.gone})
        for circle in self._circles.take(process, incarnation, waits, time.monotonic()):
            logger.warning("%s", circle.text)
            self._events.post(ev.CircleFound(circle.members, circle.text))
            self._executor.break_circle(circle)

    @rpc
    async def runs_on(self, name: str, incarnation: int, calls: tuple[Serving, ...]) -> None:
        """Report calls that run in a member although they were cancelled or timed out."""
        self._activities.reported(name, incarnation, calls, time.monotonic())

    @rpc
    async def rejected(self, name: str, pid: int, counts: Mapping[str, int]) -> None:
        """Report how many connections a process of the job has rejected, by reason."""
        self._observer.rejections.take(name, pid, counts)

    @rpc(concurrent=64)
    async def reached(self, kill: str) -> None:
        """Report that a member reached a call at which a kill is planned; answers when the signal was sent."""
        await self._observer.chaos.reached(kill)

    @rpc
    async def cannot_reach(self, kill: str, why: str) -> None:
        """Report that a member does not have the method that a kill waits for."""
        self._observer.cannot_reach(kill, why)

    # Called by services that joined

    @rpc(concurrent=256)
    async def follow(self, version: int, exits_seen: int, wait_s: float) -> MembershipUpdate:
        """Return the members' addresses and exits as soon as they are newer than the caller's."""
        return await self._subscribers.changes(version, exits_seen, wait_s)

    # Called by the driver

    @rpc
    async def agent_ended(self, node_rank: int, how: str, proven: bool) -> None:
        """Report that a node on another machine has ended, with its guardian.

        ``proven`` is False if the guardian did not say so itself.
        """
        self._watch.ended(node_rank, how, proven=proven)
        await self._events.post_and_save(ev.Tick())  # with the loss of the node, if that is proven

    @rpc
    async def status(self, records_from: int = 0) -> JobStatus:
        """Return a snapshot; ``extra`` has the pids of the processes that the driver on this machine watches."""
        here = machine_id()
        nodes = sorted(self.manager.context.nodes.items())
        agents = [node.agent_pid for _, node in nodes if node.machine == here]
        extra = {
            MASTER_PID: str(os.getpid()),
            AGENT_PIDS: ",".join(map(str, agents)),
            MASTER_PUBLIC: self._public,
            MASTERS: str(self._events.masters),
        }
        if wanted := self.manager.wanted_nodes():
            extra[WANTED_NODES] = ",".join(map(str, sorted(wanted)))
        if trouble := self._events.store_trouble:
            extra[STORE_TROUBLE] = trouble
        if rejected := str(self._observer.rejections):
            extra[REJECTED] = rejected
        status = self._activities.added_to(self.manager.status(records_from), time.monotonic())
        return replace(status, extra=extra)

    @rpc(concurrent=4)
    async def pending(self) -> tuple[MemberWaits, ...]:
        """Return what each member waits for, as the members answer."""
        return await self._executor.ask_pending()

    @rpc
    async def rehearse(self, kills: tuple[str, ...]) -> tuple[str, ...]:
        """Plan kills; return them with drawn ranks."""
        return await self._observer.rehearse(kills)

    @rpc
    async def rehearsed(self) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        """Return the kills that happened, those still to come, and those that cannot happen, with the reason."""
        return self._observer.rehearsed()

    @rpc
    async def graph(self) -> dict[str, Any]:
        """Return the call graph, as plain values."""
        return self.manager.context.graph.plain()

    @rpc(concurrent=4)
    async def stacks(self) -> dict[str, str]:
        """Return the Python stacks of all members, by name."""
        return await self._executor.ask_stacks()

    @rpc
    async def stop(self, reason: str, grace_s: float) -> None:
        await self._events.post_and_save(ev.StopRequested(reason, grace_s))

    @rpc
    async def notice(self, reason: str, within_s: float, grace_s: float) -> None:
        """Give notice that the job must end soon: its ranks stop together, save what must survive, and end."""
        await self._events.post_and_save(ev.NoticeGiven(reason, within_s, grace_s))

    @rpc
    async def goodbye(self) -> None:
        """Tell the master that the driver has seen the job's end."""
        self._goodbye.set()
        self._events.post(ev.Tick())


async def run_master(config: AgentConfig, spec: JobSpec) -> None:
    """Serve one job on the running loop."""
    end_tasks_without_memory(asyncio.get_running_loop())
    key = bytes.fromhex(config.key_hex)
    persistence = Persistence(Path(spec.run_dir) / STORE_FILE, spec.job_id)
    # No call is answered before the state is loaded.
    stored = await persistence.load()
    public = public_address(config.host)
    async with Runtime.open(
        name=MASTER, key=key, bind=config.master_endpoint, public=stored_fact(stored, "master_public") or public,
        job_id=config.job_id,
    ) as runtime:  # fmt: skip
        master = PrimeMaster(config, spec, runtime, persistence, stored)
        runtime.serve(MASTER, master, inline=True)
        await master.serve()


def main() -> int:
    """Read the configuration, serve the job, exit 0. The kernel kills this process when the agent, its parent, ends:
    a guardian that is killed with its agent ends nothing any more."""
    import uvloop

    log_to_standard_error()
    ownership.prctl(ownership.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        logger.error("the agent (pid %s) ended while this master started", sys.argv[1])
        return 1
    config = decode_config(sys.stdin.buffer.readline())
    # The driver wrote this pickle into the private folder of the job's sockets.
    spec: JobSpec = pickle.loads(private_files.read(config.job_path))
    register_secrets(secret for role in spec.roles for secret in secrets_in(role.env))
    try:
        uvloop.run(run_master(config, spec))
    except (StoreRefused, SchemaError) as error:
        logger.error("the job cannot go on: %s", error)
        return STATE_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
