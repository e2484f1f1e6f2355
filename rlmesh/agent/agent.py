"""The agent: one per node, the parent of every process of the job on it.

It knows of a death from the operating system, through the descriptor of the process, and tells the master within
milliseconds, with the process's last words. It ends with everything below it when its guardian lets go of it, when
the master on its node has done its work, or when it is told to; what it leaves after a SIGKILL, the guardian ends. A
master that dies before that is started again, while the members run on.
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

from rlmesh.agent import ownership
from rlmesh.agent.allegiance import Allegiance, Ties
from rlmesh.agent.boot import Boot
from rlmesh.agent.device_watch import DeviceWatch
from rlmesh.agent.examination import examine
from rlmesh.agent.leases import Leases
from rlmesh.agent.logs import LAST_LINES, last_lines
from rlmesh.agent.master_keeper import GiveUp, MasterKeeper, failed_start
from rlmesh.agent.member_groups import MemberGroups
from rlmesh.agent.node import node_info
from rlmesh.agent.oom import OomCounters
from rlmesh.agent.outbox import Outbox
from rlmesh.agent.process import Ended
from rlmesh.agent.protocol import MASTER, AgentConfig, ExitReport, Leftover, MemberProcess, WorkerSpec
from rlmesh.agent.spawner import Spawner
from rlmesh.agent.table import Child, ProcessTable
from rlmesh.agent.usage import NodeUse, read_use
from rlmesh.errors import LaunchError, RLMeshError, ShuttingDown
from rlmesh.job.status import ExitInfo, MemberStack
from rlmesh.memory.layout import remove_segments_of_process
from rlmesh.placement.health import DeviceBad
from rlmesh.placement.lease import LeaseAnswer
from rlmesh.runtime.inet import interface_of
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

LAST_GRACE_S = 1.5
"""Grace of the members when nobody says how long they have: the guardian is gone, or the master is."""
MASTER_WAIT_S = 0.5
SERVICE_GRACE_S = 0.0 if ownership.signals_are_shared() else 0.3
"""For processes that have nothing to lose; where signals are shared they do not hear SIGTERM."""
REPORT_WAIT_S = 10.0
FENCE_GRACE_S = 1.0
"""Grace of the members when the lease is over: the master waits for some seconds more."""
SETTLE_S = 0.5
FLUSH_S = 0.05

CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
CRASH_LINES = 60
"""After these signals the log ends with the stacks of all threads; what matters stands at their head."""

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""On one machine NCCL finds its way by itself."""

MemberKey = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass(frozen=True, slots=True)
class _Over:
    """Why the node ends, the agent's exit code for it, and how long members have."""

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
        self._master_child = self._table.adopt("master", started.master.pid) if started.master else None
        self._keeper = MasterKeeper(config, started.master)
        self._spawner = Spawner(config, self._table, started.env, started.zygotes)
        self._env, self._interface = started.env, None if config.host else "lo"
        self._members: dict[Child, WorkerSpec] = {}
        self._starting: dict[MemberKey, asyncio.Task[int]] = {}
        self._ports: list[socket.socket] = []
        self._leases = Leases()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leftovers: list[Leftover] = []
        self._oom = OomCounters()
        self._groups = MemberGroups(config.job_id, config.node_rank)
        self._closing = False
        self._over: asyncio.Future[_Over] = self._loop.create_future()
        self._last_line = b""
        self._cause = ""
        sender = f"agent:{config.node_rank}/{os.getpid()}"
        self._outbox = Outbox(runtime, runtime.peer(MASTER, config.master_endpoint), sender)
        own, public = runtime.endpoint, runtime.public_endpoint
        assert own is not None
        # The master is on the first node, whose socket folder it sees.
        self._info = info = node_info(
            config, own if config.start_master or public is None else public, public=public or ""
        )
        self._allegiance = Allegiance(
            config, runtime, sender, info, Ties(self._running, self._fence, self._give_up, self._job_over)
        )

    # Called by the master

    @rpc
    async def spawn(self, specs: tuple[WorkerSpec, ...], term: int = 0) -> tuple[int, ...]:
        """Start members and return their process numbers, in order. They are not up yet: they register. Those that
        run already are not started twice. ``term`` is the one in which it was ordered.

        Raises:
            LaunchError: one could not be started; those that could are running.
            ShuttingDown: the node is ending, or may not start what was ordered.
        """
        if self._closing:
            raise ShuttingDown(f"node {self._config.node_name} is ending and starts nothing", executed="no")
        if not self._allegiance.may_start(term):
            why = f"node {self._config.node_name} has no lease for what was ordered in term {term} and starts nothing"
            raise ShuttingDown(why, executed="no")
        results = await asyncio.gather(*map(self._start_once, specs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(pid for pid in results if isinstance(pid, int))

    @rpc
    async def running(self) -> tuple[MemberProcess, ...]:
        """The members that run here, and those whose end the master has not confirmed."""
        return self._running()

    @rpc
    async def stop_members(self, members: tuple[MemberKey, ...], grace_s: float) -> None:
        """SIGTERM, later SIGKILL; returns when they are gone. Members that are gone already are no error."""
        wanted = set(members)
        await asyncio.gather(*(task for key, task in self._starting.items() if key in wanted), return_exceptions=True)
        chosen = [child for child, spec in self._members.items() if any(m.key in wanted for m in spec.members)]
        await self._stop(chosen, grace_s)

    @rpc
    async def signal(self, member: MemberKey | None, number: int) -> None:
        """Send a signal to a member that lives, or to this agent itself: a rehearsal of a failure."""
        if member is None:
            os.kill(os.getpid(), number)
        for child, spec in self._members.items():
            if member in [m.key for m in spec.members] and child in self._table:
                logger.warning("rehearsal: signal %d to %s (pid %d)", number, child.name, child.pid)
                os.kill(child.pid, number)

    @rpc
    async def reserve_port(self, instead_of: int | None = None) -> int:
        """A port that no ``bind(0)`` gets on any address of this node until the node ends, but that a server which
        sets SO_REUSEADDR can bind: nobody listens on it. On any address, since torch's store binds to all of them,
        whatever the address is that it is told. ``instead_of`` is given up for it."""
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
        """What the node and its members use now."""
        return read_use({f"{spec.role}:{spec.rank}": child.pid for child, spec in self._members.items()})

    @rpc(concurrent=4096)
    async def lease_devices(self, key: MemberKey, timeout_s: float, group: tuple[MemberKey, ...] = ()) -> LeaseAnswer:
        """Give a member its devices when no other role has them; called by the member, in ``device_lease()``.

        Args:
            group: all members of its role, if they are on several nodes: they have their turn together, also those of
                other nodes, which have no devices here.
        """
        specs = [spec for process in self._members.values() for spec in process.members if spec.role == key[0]]
        own = [spec for spec in specs if spec.key == key]
        if not own and not group:
            raise ShuttingDown(f"{key[0]}:{key[1]} is no member on node {self._config.node_name}", executed="no")
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
        """What the processes of these members do; those that are gone are left out. Of those that are ``silent``, that
        is did not answer when they were asked, also their stacks, whatever keeps them busy."""
        wanted, mute = set(members), set(silent)
        found = [(child, spec) for child, spec in self._members.items() if any(m.key in wanted for m in spec.members)]
        folder = self._config.socket_dir
        seen = await asyncio.gather(
            *(examine(spec, child.pid, folder, any(m.key in mute for m in spec.members)) for child, spec in found)
        )
        return tuple(
            replace(stack, role=member.role, rank=member.rank, incarnation=member.incarnation)
            for stack, (_, spec) in zip(seen, found, strict=True)
            for member in spec.members
            if member.key in wanted
        )

    @rpc
    async def shutdown(self, grace_s: float) -> ExitReport:
        """End all members and what they left; the agent ends soon after (with the master, where it runs)."""
        report = await self._end_members(grace_s)
        if self._master_child is None or self._master_child not in self._table:
            self._loop.call_later(FLUSH_S, self._end, _Over("shutdown"))
        return report

    # Members

    async def _start_once(self, spec: WorkerSpec) -> int:
        """Start a member unless it runs or is being started. A start goes on when the master that asked for it died:
        a fork is not to be left half-way, and the next master asks again."""
        key = spec.key
        for child, other in self._members.items():
            if other.key == key:
                return child.pid
        task = self._starting.get(key)
        if task is None:
            task = self._starting[key] = self._loop.create_task(self._start_member(spec))
            task.add_done_callback(partial(self._was_started, key))
        return await asyncio.shield(task)

    def _was_started(self, key: MemberKey, task: asyncio.Task[int]) -> None:
        del self._starting[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s:%d.%d was not started: %s", *key, error)

    async def _start_member(self, spec: WorkerSpec) -> int:
        spec = replace(self._completed(spec), cgroup=self._groups.make(spec))
        started = await self._spawner.start_member(spec)
        self._members[started.child] = spec
        logger.info(
            "%s:%d.%d is pid %d (%s, %.0f ms)",
            spec.role, spec.rank, spec.incarnation, started.child.pid, started.way, started.took_s * 1000,
        )  # fmt: skip
        if started.child.ended.done():  # it died before its number was known here
            self._member_ended(started.child, started.child.ended.result())
        elif self._closing or not self._allegiance.may_start():
            self._do(self._stop([started.child], 0.0))
        return started.child.pid

    def _completed(self, spec: WorkerSpec) -> WorkerSpec:
        """What only this node knows."""
        config = self._config
        env = {**self._network_env(), **spec.env} if "MASTER_ADDR" in spec.env else spec.env
        return replace(
            spec, key_hex=config.key_hex, master_endpoint=config.master_endpoint, socket_dir=config.socket_dir,
            host=config.host, env=env, nvml=config.nvml, agent_endpoint=self._runtime.endpoint or "",
            fused=tuple(map(self._completed, spec.fused)),
        )  # fmt: skip

    def _network_env(self) -> dict[str, str]:
        """The interface that process groups use: left to themselves they ask what the host's name resolves to, which
        may be nothing, or an address that others do not reach."""
        if self._interface is None:
            self._interface = interface_of(self._config.host or "127.0.0.1")
        names = _INTERFACE_VARIABLES if self._config.host else _INTERFACE_VARIABLES[:1]
        return {name: self._interface for name in names if self._interface and name not in self._env}

    def _on_exit(self, child: Child, ended: Ended) -> None:
        logger.info("%s (pid %d) %s", child.name, child.pid, ended.describe())
        spec = self._members.get(child)
        if child is self._master_child:
            self._master_ended(ended)
        elif child in self._members:
            self._member_ended(child, ended)
        elif child in self._spawner.service and not self._closing:
            logger.warning("the %s process ended; workers start without it", child.name)
        # Its shared memory goes with it, so that nothing stays in /dev/shm while the job lives on.
        self._do(self._remove_segments(child.pid, child.name))
        self._do(self._end_left(child.name, spec))

    def _member_ended(self, child: Child, ended: Ended) -> None:
        spec = self._members.pop(child)
        info = ExitInfo(
            *spec.key,
            pid=ended.pid,
            exit_code=ended.exit_code,
            signal=ended.signal,
            at=ended.at,
            node_rank=self._config.node_rank,
            hostname=os.uname().nodename,
            log_path=spec.log_path,
            last_log_lines=last_lines(spec.log_path, CRASH_LINES if ended.signal in CRASHES else LAST_LINES),
            peak_rss_bytes=ended.peak_rss_bytes,
            oom=self._oom.look(ended.peak_rss_bytes, spec.cgroup) if ended.signal == signal.SIGKILL else "",
        )
        for member in spec.members:
            self._leases.gone(member.key)
            if not self._over.done():  # Else it ends with its node, which is told as a whole.
                self._outbox.put(replace(info, role=member.role, rank=member.rank, incarnation=member.incarnation))

    def _running(self) -> tuple[MemberProcess, ...]:
        """The members that run here, and those whose end the master may not know of."""
        running = [
            MemberProcess(*member.key, child.pid) for child, spec in self._members.items() for member in spec.members
        ]
        running += [MemberProcess(*key, 0) for key in self._starting]
        untold = [exit for exit in self._outbox.kept() if isinstance(exit, ExitInfo)]
        return (*running, *(MemberProcess(exit.role, exit.rank, exit.incarnation, exit.pid) for exit in untold))

    async def _fence(self, why: str) -> None:
        """No member may run here any longer, nor one whose start is under way."""
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await self._stop(list(self._members), FENCE_GRACE_S)
        await self._end_orphans("the members")

    def _job_over(self) -> None:
        self._end(_Over("the job is over"))

    def _give_up(self, why: str) -> None:
        self._cause = self._cause or why
        self._end(_Over(why, 1))

    # The master

    def _master_ended(self, ended: Ended) -> None:
        if self._closing or ended.exit_code == 0:
            self._keeper.let_go()
            self._end(_Over(f"the master {ended.describe()}"))
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
            self._give_up(failed_start(error).why)

    async def _remove_segments(self, pid: int, name: str) -> None:
        job_id, node_rank = self._config.job_id, self._config.node_rank
        try:
            removed = await asyncio.to_thread(remove_segments_of_process, job_id, node_rank, pid)
        except OSError as error:
            logger.warning("shared memory that %s (pid %d) may have left was not looked for: %s", name, pid, error)
            return
        if removed:
            logger.info("%s (pid %d) left %d segments of shared memory, which are removed", name, pid, removed)

    async def _end_orphans(self, left_by: str) -> None:
        for process, owner in (await self._table.end_orphans(left_by)).items():
            await self._remove_segments(process.pid, str(process))
            self._leftovers.append(Leftover("process", f"{process} left by {owner}", not _runs(process)))

    async def _end_left(self, left_by: str, spec: WorkerSpec | None) -> None:
        """What a process left: by its descent, with a moment to end in good order, then by its control group."""
        await self._end_orphans(left_by)
        for process in await self._groups.end(spec) if spec is not None else ():
            self._leftovers.append(Leftover("process", f"{process} left by {left_by}", not _runs(process)))

    async def _stop(self, children: list[Child], grace_s: float) -> None:
        ends = await asyncio.gather(*(self._table.stop(child, grace_s) for child in children), return_exceptions=True)
        for child, end in zip(children, ends, strict=True):
            if isinstance(end, TimeoutError):
                logger.error("%s (pid %d) survived SIGKILL: it waits in the kernel", child.name, child.pid)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Life

    async def live(self) -> int:
        """Register, serve until the node is over, end everything; returns the exit code."""
        self._loop.add_reader(0, self._on_input)
        if not ownership.signals_are_shared():
            self._loop.add_signal_handler(signal.SIGTERM, self._end, _Over("SIGTERM", 128 + signal.SIGTERM))
        self._allegiance.start()
        watch = DeviceWatch(self._config.node_rank, self._info.devices, self._config.nvml, self._device_is_bad)
        self._watch = self._loop.create_task(watch.run())
        over = await self._over
        self._loop.remove_reader(0)
        if self._watch is not None:
            self._watch.cancel()
        logger.info("node %s ends: %s", self._config.node_name, over.why)
        report = await self._end_members(over.grace_s)
        await self._allegiance.close()
        await self._end_master()
        await self._settle()
        with suppress(BrokenPipeError):  # the guardian was killed
            os.write(1, json.dumps(asdict(replace(report, cause=self._cause))).encode() + b"\n")
        return over.code

    async def _device_is_bad(self, bad: DeviceBad) -> None:
        logger.error("%s", bad.describe())
        try:
            for uuid in bad.uuids:
                master = self._runtime.peer(MASTER, self._config.master_endpoint).options(
                    timeout_s=REPORT_WAIT_S, idempotent=True
                )
                await master.call("device_failed", bad.node_rank, uuid, bad.why)
        except RLMeshError as error:
            logger.error("the master was not told that %s: %s", bad.describe(), error)

    def _on_input(self) -> None:
        """The guardian's pipe: a number of seconds may come before its end."""
        data = os.read(0, 4096)
        if data:
            self._last_line += data
            return
        self._loop.remove_reader(0)
        grace_s = LAST_GRACE_S
        with suppress(ValueError):
            grace_s = max(0.1, float(self._last_line) - 1.0)  # the rest is for what comes after the members
        self._end(_Over("its guardian let go of it", 0, grace_s))

    def _end(self, over: _Over) -> None:
        if not self._over.done():
            self._over.set_result(over)

    async def _end_members(self, grace_s: float) -> ExitReport:
        self._closing = True
        await self._stop(list(self._members), grace_s)
        await self._spawner.close()
        await self._stop([child for child in self._spawner.service if child in self._table], SERVICE_GRACE_S)
        await self._end_orphans("the members")
        for holder in self._ports:
            holder.close()
        self._ports.clear()
        if not await self._groups.close():
            self._leftovers.append(Leftover("control_group", "of the node: a process in it does not end", False))
        survivors = [child for child in self._members if child in self._table]
        stuck = tuple(Leftover("process", f"pid {child.pid} ({child.name})", False) for child in survivors)
        return ExitReport(self._config.node_rank, self._table.started, (*self._leftovers, *stuck))

    async def _end_master(self) -> None:
        """It may be about to end by itself, and have files to close."""
        self._keeper.let_go()
        if self._master_child is not None and self._master_child in self._table:
            await asyncio.wait([self._master_child.ended], timeout=MASTER_WAIT_S)
            await self._stop([self._master_child], SERVICE_GRACE_S)

    async def _settle(self) -> None:
        """Let reports that are under way arrive, but not for long."""
        if self._outbox.kept() and self._master_lives():
            await asyncio.to_thread(self._outbox.drain, SETTLE_S)
        self._outbox.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SETTLE_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._watch] if self._watch else []), return_exceptions=True)
        self._table.close()

    def _master_lives(self) -> bool:
        """As far as this node can know."""
        return self._master_child is None or self._master_child in self._table


def _runs(process: ownership.Process) -> bool:
    found = ownership.read_process(process.pid)
    return found is not None and found == process and found.running
