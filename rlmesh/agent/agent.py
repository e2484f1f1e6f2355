"""The agent: one per node, the parent of every process of the job on it.

The agent learns of a process's death from its process descriptor, and reports it to the master within milliseconds,
with the last lines of its log. The agent ends with everything below it when its guardian closes the pipe or the job is
over; after a SIGKILL of the agent, the guardian cleans up. If the master dies earlier, the agent restarts it while the
members run on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rlmesh.agent.boot import Boot
from rlmesh.agent.device_lease_server import DeviceLeaseServer
from rlmesh.agent.master_keeper import GiveUp, MasterKeeper
from rlmesh.agent.master_session import AgentCallbacks, Freezer, MasterSession
from rlmesh.agent.members import MemberKey, NodeMembers
from rlmesh.agent.monitoring.device_watch import DeviceWatch
from rlmesh.agent.monitoring.rejections import RejectionReporter
from rlmesh.agent.monitoring.usage import NodeUse, read_use
from rlmesh.agent.node_description import node_info
from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.cleanup import Cleanup
from rlmesh.agent.processes.process import Ended
from rlmesh.agent.processes.process_table import Child, ProcessTable, stop
from rlmesh.agent.processes.spawner import Spawner
from rlmesh.agent.processes.stopped import LOOK_S, LOOKS, StoppedLooks
from rlmesh.agent.protocol import MASTER, AgentConfig, ExitReport, MemberProcess, WorkerSpec
from rlmesh.agent.reliable_outbox import Outbox, new_sender
from rlmesh.agent.socket_folder import SocketFolder
from rlmesh.errors import LaunchError, RLMeshError, ShuttingDown
from rlmesh.job.status import ExitInfo, MemberStack
from rlmesh.placement.device_leases import LeaseAnswer
from rlmesh.placement.machine.gpu_health import DeviceBad
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

LAST_GRACE_S = 1.5
"""Grace of the members in seconds when nobody gives one, because the guardian or the master is gone."""
MASTER_WAIT_S = 0.5
SERVICE_GRACE_S = 0.0 if ownership.signals_are_shared() else 0.3
"""Grace of service processes, which have nothing to lose. Where signals are shared they do not get SIGTERM."""
REPORT_WAIT_S = 10.0
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class _NodeEnd:
    """The reason why the node ends, the agent's exit code, and the grace of the members in seconds."""

    why: str
    code: int = 0
    grace_s: float = LAST_GRACE_S


class Agent:
    """Served as ``@agent``; called by the master."""

    def __init__(self, config: AgentConfig, runtime: Runtime, started: Boot) -> None:
        self._config = config
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._table = ProcessTable(self._on_exit)
        self._master_child = self._table.adopt("master", started.master) if started.master else None
        self._keeper = MasterKeeper(config)
        self._spawner = Spawner(config, self._table, started.env, started.zygotes)
        self._cleanup = Cleanup(config, self._table)
        self._ports: list[socket.socket] = []
        self._leases = DeviceLeaseServer()
        self._watch: asyncio.Task[None] | None = None
        self._folder = SocketFolder(config)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._over: asyncio.Future[_NodeEnd] = self._loop.create_future()
        self._last_line = b""
        self._cause = ""
        sender = new_sender(f"agent:{config.node_rank}")
        self._outbox = Outbox(runtime, runtime.peer(MASTER, config.master_endpoint), sender)
        own, public = runtime.endpoint, runtime.public_endpoint
        assert own is not None
        self._members = NodeMembers(
            config, own, started.env, self._table, self._spawner, self._cleanup,
            ended=self._member_ended, unwanted=self._may_not_run, do=self._do,
        )  # fmt: skip
        # The master runs on the first node: there it reaches the agent by its socket, elsewhere by the public endpoint.
        self._info = info = node_info(
            config, own if config.start_master or public is None else public, public=public or ""
        )
        for note in info.notes:
            logger.warning("%s", note)
        callbacks = AgentCallbacks(
            self._pids, self._running, self._fence, Freezer(self._pids), self._give_up, self._job_over
        )
        self._session = MasterSession(config, runtime, sender, info, callbacks)

    # Called by the master

    @rpc
    async def spawn(self, specs: tuple[WorkerSpec, ...], term: int = 0) -> tuple[int, ...]:
        """Start members and return their process numbers, in order. The members are not up yet: they register when they
        are. Members that run, or have run and ended, are not started again. ``term``: how often the master had given
        this node up when it ordered the starts; they are refused if that is not the term of the last `Grant`.

        Raises:
            LaunchError: a member could not be started; the others are running.
            ShuttingDown: the node is ending, or has no lease for this term.
        """
        if self._closing:
            raise ShuttingDown(f"node {self._config.node_name} is ending and starts nothing", executed="no")
        if not self._session.may_start(term):
            why = f"node {self._config.node_name} has no lease for starts ordered in term {term} and starts nothing"
            raise ShuttingDown(why, executed="no")
        self._folder.look()
        return await self._members.start(specs)

    @rpc
    async def running(self) -> tuple[MemberProcess, ...]:
        """The members that run here, and those whose end the master has not confirmed."""
        return self._running()

    @rpc
    async def stop_members(self, members: tuple[MemberKey, ...], grace_s: float) -> None:
        """Send SIGTERM, later SIGKILL; return when the members are gone. Members that are already gone are no error."""
        await self._members.started(members)
        await self._members.stop([child for child, _ in self._members.living_in(members)], grace_s)

    @rpc
    async def signal(self, member: MemberKey | None, number: int) -> None:
        """Send a signal to a running member, or to this agent (None): a rehearsal of a failure."""
        if member is None:
            os.kill(os.getpid(), number)
        for child, _ in self._members.living_in([member] if member is not None else []):
            if child in self._table:
                logger.warning("rehearsal: signal %d to %s (pid %d)", number, child.name, child.pid)
                os.kill(child.pid, number)

    @rpc
    async def reserve_port(self, instead_of: int | None = None) -> int:
        """Reserve a port on all addresses of this node until the node ends.

        No ``bind(0)`` gets the port, but a server that sets SO_REUSEADDR can bind it, since nobody listens on it. All
        addresses are needed because torch's store binds to all of them. The port ``instead_of`` is released.
        """
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
        except OSError:
            holder.close()
            raise
        for old in [holder for holder in self._ports if holder.getsockname()[1] == instead_of]:
            self._ports.remove(old)
            old.close()
        self._ports.append(holder)
        port: int = holder.getsockname()[1]
        return port

    @rpc
    async def usage(self) -> NodeUse:
        """CPU, memory and device use of the node and its members now."""
        return read_use({f"{spec.role}:{spec.rank}": child.pid for child, spec in self._members})

    @rpc(concurrent=4096)
    async def lease_devices(self, key: MemberKey, timeout_s: float, group: tuple[MemberKey, ...] = ()) -> LeaseAnswer:
        """Lease a member its devices once no other role has them; the member calls it in ``device_lease()``.

        Args:
            group: all members of the role if it is on several nodes, else empty: these members take their turn as one
                group. Members of other nodes belong to it too, without devices here.
        """
        specs = [spec for _, process in self._members for spec in process.members if spec.role == key[0]]
        own = [spec for spec in specs if spec.key == key]
        if not own and not group:
            raise ShuttingDown(f"{key[0]}:{key[1]} is not a member on node {self._config.node_name}", executed="no")
        turn = specs if group or own[0].backend == "elastic" else own
        together = {spec.key: tuple(device.uuid for device in spec.devices) for spec in turn}
        if group:
            together = {member: together.get(member, ()) for member in group}
        return await self._leases.take(key, together, timeout_s)

    @rpc(concurrent=64)
    async def return_devices(self, key: MemberKey) -> None:
        self._leases.give_back(key)

    @rpc(concurrent=4)
    async def examine(
        self, members: tuple[MemberKey, ...], silent: tuple[MemberKey, ...] = ()
    ) -> tuple[MemberStack, ...]:
        """State of the members' processes; members that are gone are left out. Members in ``silent`` did not answer
        when
        asked for their stacks: the agent gets these by a signal, whatever keeps the member busy."""
        return await self._members.examine(members, silent)

    @rpc
    async def silent(self) -> dict[MemberKey, str]:
        """The members that do not answer, with the reason."""
        return self._members.silent()

    def _on_exit(self, child: Child, ended: Ended) -> None:
        logger.info("%s (pid %d) %s", child.name, child.pid, ended.describe())
        spec = self._members.spec_of(child)
        if child is self._master_child:
            self._master_ended(ended)
        elif spec is not None:
            self._members.process_ended(child, ended)
        elif child in self._spawner.service and not self._closing:
            logger.warning("the %s process ended; workers start without it", child.name)
        self._do(self._cleanup.remove_segments(child.pid, child.name))
        self._do(self._cleanup.end_of(child.name, spec))

    def _member_ended(self, exit: ExitInfo) -> None:
        self._leases.gone((exit.role, exit.rank, exit.incarnation))
        if not self._over.done():  # else the node is ending, and its exit report covers this member
            self._outbox.put(exit)

    def _may_not_run(self) -> bool:
        return self._closing or self._session.must_not_run()

    def _pids(self) -> list[int]:
        return [child.pid for child, _ in self._members]

    def _running(self) -> tuple[MemberProcess, ...]:
        """Members that run here, and members whose end the master has not confirmed."""
        unconfirmed = [exit for exit in self._outbox.unconfirmed() if isinstance(exit, ExitInfo)]
        return (
            *self._members.running(),
            *(MemberProcess(exit.role, exit.rank, exit.incarnation, exit.pid) for exit in unconfirmed),
        )

    async def _fence(self, grace_s: float) -> None:
        """End all members, including those whose start is under way: none may run here any longer."""
        await self._members.started()
        await self._members.stop_all(grace_s)
        await self._cleanup.end_orphans("the members")

    def _job_over(self) -> None:
        self._end(_NodeEnd("the job is over"))

    def _give_up(self, why: str) -> None:
        self._cause = self._cause or why
        self._end(_NodeEnd(why, 1))

    # The master

    def _master_ended(self, ended: Ended) -> None:
        if self._closing or ended.exit_code == 0:
            self._end(_NodeEnd(f"the master {ended.describe()}"))
            return
        verdict = self._keeper.ended(ended)
        if isinstance(verdict, GiveUp):
            self._give_up(verdict.why)
        else:
            self._loop.call_later(verdict.after_s, self._start_master)

    def _start_master(self) -> None:
        if self._closing or self._over.done():
            return
        try:
            self._master_child = self._table.adopt("master", self._keeper.start())
        except (LaunchError, ProcessLookupError) as error:
            self._give_up(f"the master could not be started again: {error}")

    # Life

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def live(self) -> int:
        """Register, serve until the node ends, and end all processes; return the exit code."""
        self._loop.add_reader(0, self._on_input)
        if not ownership.signals_are_shared():
            self._loop.add_signal_handler(signal.SIGTERM, self._end, _NodeEnd("SIGTERM", 128 + signal.SIGTERM))
        self._session.start()
        master = self._runtime.peer(MASTER, self._config.master_endpoint)
        name = f"agent:{self._config.node_rank}"
        RejectionReporter(self._runtime, partial(master.notify, "rejected", name)).start()
        watch = DeviceWatch(self._config.node_rank, self._info.devices, self._config.nvml, self._device_is_bad)
        self._watch = self._loop.create_task(watch.run())
        beside = [self._loop.create_task(each) for each in (self._folder.watch(), self._watch_stops())]
        over = await self._over
        for task in beside:
            task.cancel()
        self._loop.remove_reader(0)
        if self._watch is not None:
            self._watch.cancel()
        logger.info("node %s ends: %s", self._config.node_name, over.why)
        report = await self._end_members(over.grace_s)
        await self._session.close()
        await self._end_master()
        await self._settle()
        with suppress(BrokenPipeError):  # the guardian was killed
            os.write(1, json.dumps(asdict(replace(report, cause=self._cause))).encode() + b"\n")
        return over.code

    async def _watch_stops(self) -> None:
        """Kill a master or zygote that is stopped: the master is restarted, and members start without the zygote."""
        looks = StoppedLooks()
        while True:
            await asyncio.sleep(LOOK_S)
            known = {child.pid: child for child in (self._master_child, *self._spawner.service) if child is not None}
            for pid in looks.look(pid for pid, child in known.items() if child in self._table):
                logger.error("the %s (pid %d) was stopped for %g s; it is killed", known[pid].name, pid, LOOKS * LOOK_S)
                self._table.signal(known[pid], signal.SIGKILL)

    async def _device_is_bad(self, bad: DeviceBad) -> None:
        logger.error("%s", bad.describe())
        try:
            for uuid in bad.uuids:
                master = self._runtime.peer(MASTER, self._config.master_endpoint).options(
                    timeout_s=REPORT_WAIT_S, idempotent=True
                )
                await master.call("device_failed", bad.node_rank, uuid, bad.why)
        except RLMeshError as error:
            logger.error("the master got no report that %s: %s", bad.describe(), error)

    def _on_input(self) -> None:
        """Read the guardian's pipe until its end; a line before the end gives the members' grace in seconds."""
        data = os.read(0, 4096)
        if data:
            self._last_line += data
            return
        self._loop.remove_reader(0)
        grace_s = LAST_GRACE_S
        with suppress(ValueError):
            grace_s = max(0.1, float(self._last_line) - 1.0)  # 1 s is for the cleanup after the members have ended
        self._end(_NodeEnd("its guardian has closed its input", 0, grace_s))

    def _end(self, over: _NodeEnd) -> None:
        if not self._over.done():
            self._over.set_result(over)

    async def _end_members(self, grace_s: float) -> ExitReport:
        self._closing = True
        await self._members.stop_all(grace_s)
        await self._spawner.close()
        await stop(self._table, [child for child in self._spawner.service if child in self._table], SERVICE_GRACE_S)
        await self._cleanup.end_orphans("the members")
        for holder in self._ports:
            holder.close()
        self._ports.clear()
        left = await self._cleanup.all()
        return ExitReport(self._config.node_rank, self._table.started, (*left, *self._members.stuck()))

    async def _end_master(self) -> None:
        """End the master, which may be about to end by itself and have files to close."""
        if self._master_child is not None and self._master_child in self._table:
            await asyncio.wait([self._master_child.ended], timeout=MASTER_WAIT_S)
            await stop(self._table, [self._master_child], SERVICE_GRACE_S)

    async def _settle(self) -> None:
        """Wait shortly for reports that are under way."""
        if self._outbox.unconfirmed() and self._master_lives():
            await asyncio.to_thread(self._outbox.drain, SETTLE_S)
        self._outbox.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._watch] if self._watch else []), return_exceptions=True)
        self._table.close()

    def _master_lives(self) -> bool:
        """True if the master lives, as far as this node can know."""
        return self._master_child is None or self._master_child in self._table
