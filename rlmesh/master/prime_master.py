"""The master's process: ``python -m rlmesh.master.prime_master`` with an agent's configuration on stdin.

``PrimeMaster`` is the shell around ``JobManager``: it turns calls of agents, workers and the driver into
events, and lets ``Executor`` carry out what follows. It never touches what members say to each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh.agent.logs import last_lines
from rlmesh.agent.node import machine_id
from rlmesh.agent.protocol import MASTER, AgentConfig, MemberHello
from rlmesh.agent.start import decode_config
from rlmesh.errors import CallError
from rlmesh.job.status import EdgeStats, ExitInfo, JobStatus, MemberWaits, MetricRecord
from rlmesh.master import events as ev
from rlmesh.master.executor import Executor
from rlmesh.master.followers import Followers
from rlmesh.master.job_manager import JobManager
from rlmesh.master.jobspec import AGENT_PIDS, MASTER_PID, MASTER_PUBLIC, JobSpec
from rlmesh.master.observer import Observer
from rlmesh.master.scheduler import Scheduler, Site
from rlmesh.placement.inventory import NodeInfo
from rlmesh.runtime.inet import join_host_port
from rlmesh.runtime.joining import JobView
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rlmesh.observe.metrics import MetricsWriter

logger = logging.getLogger(__name__)

TICK_S = 0.1
GOODBYE_WAIT_S = 30.0
"""How long the master answers the driver after the end of the job."""


class PrimeMaster:
    """The brain of one job, served as ``@master``.

    Args:
        config: of the agent that started this process.
        spec: the job.
        runtime: an embedded runtime, bound to the master's endpoint.
        clock: seconds since the epoch.
    """

    def __init__(
        self, config: AgentConfig, spec: JobSpec, runtime: Runtime, *, clock: Callable[[], float] = time.time
    ) -> None:
        scheduler = Scheduler(spec, Site(config.key_hex, config.master_endpoint))
        self.manager = JobManager(spec, scheduler, clock(), last_lines)
        self._clock = clock
        self._public = runtime.public_endpoint or ""
        self._executor = Executor(runtime, self.manager, scheduler, self.post)
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._followers = Followers(spec)
        self._writer: MetricsWriter | None = None
        self._goodbye = asyncio.Event()
        self._watched: dict[int, int] = {}
        self._observer = Observer(self.manager, runtime, clock)

    def post(self, event: ev.Event) -> None:
        """Put an event behind those that came before."""
        self._events.put_nowait(event)

    async def serve(self) -> None:
        """Run the job until the driver has said goodbye, or did not within ``GOODBYE_WAIT_S`` of its end."""
        ended_at: float | None = None
        await self._observer.open()
        try:
            while not self._goodbye.is_set():
                try:
                    event = await asyncio.wait_for(self._events.get(), TICK_S)
                except TimeoutError:
                    event = ev.Tick()
                self._handle(event)
                if self.manager.ended and ended_at is None:
                    ended_at = self._clock()
                if ended_at is not None and self._clock() - ended_at > GOODBYE_WAIT_S:
                    logger.warning("the driver did not say goodbye within %g s", GOODBYE_WAIT_S)
                    break
            await asyncio.sleep(0)
        finally:
            await self._close()

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.Reported):
            self._write(event.record)
        before = self.manager.context.stage
        actions = self.manager.handle(event, self._clock())
        self._executor.perform(actions)
        self._followers.note(actions)
        if isinstance(event, ev.AgentRegistered):
            self._watch_agent(event.node)
        if (stage := self.manager.context.stage) != before:
            logger.info("job %s: %s → %s", self.manager.context.spec.job_name, before, stage)
            for failure in self.manager.context.failures:
                logger.info("failure: %s", failure.message)

    def _write(self, record: MetricRecord) -> None:
        if self._writer is None:
            from rlmesh.observe.metrics import MetricsWriter

            self._writer = MetricsWriter(Path(self.manager.context.spec.run_dir))
        self._writer.write(record)

    def _watch_agent(self, node: NodeInfo) -> None:
        """An agent on this machine is watched through its process; its end is noticed at once."""
        if node.node_rank in self._watched or node.machine != machine_id():
            return
        try:
            fd = os.pidfd_open(node.agent_pid)
        except OSError:
            self.post(ev.AgentLost(node.node_rank, f"(pid {node.agent_pid}) has ended"))
            return
        self._watched[node.node_rank] = fd

        def ended() -> None:
            self._unwatch(node.node_rank)
            self.post(ev.AgentLost(node.node_rank, f"(pid {node.agent_pid} on {node.hostname}) died"))

        asyncio.get_running_loop().add_reader(fd, ended)

    def _unwatch(self, node_rank: int) -> None:
        fd = self._watched.pop(node_rank, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    async def _close(self) -> None:
        for node_rank in list(self._watched):
            self._unwatch(node_rank)
        await self._observer.close()
        await self._executor.close()
        if self._writer is not None:
            self._writer.close()

    # Called by agents

    @rpc
    async def register_agent(self, node: NodeInfo) -> None:
        self.post(ev.AgentRegistered(node))

    @rpc
    async def member_exited(self, node_rank: int, exit: ExitInfo) -> None:
        self.post(ev.MemberExited(node_rank, exit))

    @rpc
    async def device_failed(self, node_rank: int, uuid: str, what: str) -> None:
        self.post(ev.DeviceFailed(node_rank, uuid, what))

    # Called by workers

    @rpc
    async def register_member(self, hello: MemberHello) -> None:
        self.post(ev.MemberBound(hello.role, hello.rank, hello.incarnation, hello.pid, hello.endpoint, hello.public))

    @rpc
    async def member_ready(self, role: str, rank: int, incarnation: int) -> None:
        self.post(ev.MemberReady(role, rank, incarnation))

    @rpc
    async def member_failed(self, role: str, rank: int, incarnation: int, exc: Exception, tb: str) -> None:
        text = f"{type(exc).__name__}: {exc}"
        self.post(ev.MemberFailed(role, rank, incarnation, text, tb, isinstance(exc, CallError)))

    @rpc
    async def run_finished(self, role: str, rank: int, incarnation: int) -> None:
        self.post(ev.RunFinished(role, rank, incarnation))

    @rpc
    async def stopping_at(self, role: str, rank: int, incarnation: int, step: int) -> None:
        self.post(ev.StoppedAt(role, rank, incarnation, step))

    @rpc
    async def report(self, record: MetricRecord) -> None:
        self.post(ev.Reported(record))

    @rpc
    async def observed(self, caller: str, edges: tuple[EdgeStats, ...]) -> None:
        """Whom a member called since it said so before."""
        self._observer.observed(caller, edges)

    @rpc(concurrent=64)
    async def reached(self, kill: str) -> None:
        """The member has come to a call at which somebody is to be killed; answered when the signal was sent."""
        await self._observer.reached(kill)

    # Called by services that joined

    @rpc(concurrent=256)
    async def follow(self, version: int, exits_seen: int, wait_s: float) -> JobView:
        """The members' addresses and ends, as soon as there is something newer than what the caller knows."""
        return await self._followers.changes(version, exits_seen, wait_s)

    # Called by the driver

    @rpc
    async def agent_ended(self, node_rank: int, how: str) -> None:
        """The guardian of a node on another machine has ended, and all of the node with it."""
        self.post(ev.AgentLost(node_rank, how))

    @rpc
    async def status(self, records_from: int = 0) -> JobStatus:
        """A snapshot; ``extra`` has the numbers of the processes that the driver on this machine watches."""
        here = machine_id()
        nodes = sorted(self.manager.context.nodes.items())
        agents = [node.agent_pid for _, node in nodes if node.machine == here]
        extra = {MASTER_PID: str(os.getpid()), AGENT_PIDS: ",".join(map(str, agents)), MASTER_PUBLIC: self._public}
        return replace(self.manager.status(records_from), extra=extra)

    @rpc(concurrent=4)
    async def pending(self) -> tuple[MemberWaits, ...]:
        """Whom each member waits for; asked of the members themselves."""
        return await self._executor.ask_pending()

    @rpc
    async def rehearse(self, kills: tuple[str, ...]) -> tuple[str, ...]:
        """Kill somebody when the moment comes; the kills, with what was drawn."""
        return self._observer.rehearse(kills)

    @rpc
    async def rehearsed(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The kills that happened, and those that are still to come."""
        return self._observer.rehearsed()

    @rpc
    async def graph(self) -> dict[str, Any]:
        """The graph of calls, as plain values."""
        return self.manager.context.graph.plain()

    @rpc(concurrent=4)
    async def stacks(self) -> dict[str, str]:
        """The Python stacks of all members, by name."""
        return await self._executor.ask_stacks()

    @rpc
    async def stop(self, reason: str, grace_s: float) -> None:
        self.post(ev.StopRequested(reason, grace_s))

    @rpc
    async def notice(self, reason: str, within_s: float, grace_s: float) -> None:
        """The job must end soon: its ranks stop together, save what must survive, and end."""
        self.post(ev.NoticeGiven(reason, within_s, grace_s))

    @rpc
    async def goodbye(self) -> None:
        """The driver has seen the end; agents end when their drivers let go of their guardians."""
        self._goodbye.set()
        self.post(ev.Tick())


async def run_master(config: AgentConfig, spec: JobSpec) -> None:
    """Serve one job on the running loop."""
    key = bytes.fromhex(config.key_hex)
    public = f"tcp://{join_host_port(config.host, '*')}" if config.host else None
    async with Runtime.open(
        name=MASTER, key=key, bind=config.master_endpoint, public=public, job_id=config.job_id
    ) as runtime:
        master = PrimeMaster(config, spec, runtime)
        runtime.serve(MASTER, master, inline=True)
        await master.serve()


def main() -> int:
    """Read the configuration, serve the job, exit 0. Ends at once when its agent, its parent, is gone."""
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = decode_config(sys.stdin.buffer.readline())
    spec: JobSpec = pickle.loads(Path(config.job_path).read_bytes())
    uvloop.run(run_master(config, spec))
    return 0


if __name__ == "__main__":
    sys.exit(main())
