"""The agent: one per node, the parent of every process of the job on it.

It knows of a death from the operating system, through the descriptor of the process, and tells the master within
milliseconds, with the process's last words. It ends with everything below it when its guardian lets go of it, when
the master on its node has ended, or when it is told to; what it leaves after a SIGKILL, the guardian ends.
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
from typing import Any

from rlmesh.agent import ownership
from rlmesh.agent.boot import Boot
from rlmesh.agent.device_watch import DeviceWatch
from rlmesh.agent.examination import examine
from rlmesh.agent.leases import Leases
from rlmesh.agent.logs import LAST_LINES, last_lines
from rlmesh.agent.node import node_info
from rlmesh.agent.oom import OomCounters
from rlmesh.agent.process import Ended
from rlmesh.agent.protocol import AGENT, MASTER, AgentConfig, ExitReport, Leftover, WorkerSpec
from rlmesh.agent.spawner import Spawner
from rlmesh.agent.stacks import dump_stacks, stacks_file
from rlmesh.agent.table import Child, ProcessTable
from rlmesh.agent.usage import NodeUse, read_use
from rlmesh.errors import CallError, LaunchError, RLMeshError, ShuttingDown
from rlmesh.job.status import ExitInfo, MemberStack
from rlmesh.memory.layout import remove_segments_of_process
from rlmesh.placement.health import DeviceBad
from rlmesh.placement.lease import LeaseAnswer
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.inet import interface_of, join_host_port
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

__all__ = ["Agent", "run_agent"]

logger = logging.getLogger(__name__)

REGISTER_WAIT_S = 60.0
REPORT_WAIT_S = 10.0
LAST_GRACE_S = 1.5
"""Grace of the members when nobody says how long they have: the guardian is gone, or the master is."""
MASTER_WAIT_S = 0.5
SERVICE_GRACE_S = 0.0 if ownership.signals_are_shared() else 0.3
"""For processes that have nothing to lose; where signals are shared they do not hear SIGTERM."""
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
        self._lifeline = started.master.lifeline if started.master else None
        self._spawner = Spawner(config, self._table, started.env, started.zygotes)
        self._env, self._interface = started.env, None if config.host else "lo"
        self._members: dict[Child, WorkerSpec] = {}
        self._ports: list[socket.socket] = []
        self._leases = Leases()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leftovers: list[Leftover] = []
        self._oom = OomCounters()
        self._closing = False
        self._over: asyncio.Future[_Over] = self._loop.create_future()
        self._last_line = b""

    @property
    def _master(self) -> MemberHandle:
        return self._runtime.peer(MASTER, self._config.master_endpoint)

    # Called by the master

    @rpc
    async def spawn(self, specs: tuple[WorkerSpec, ...]) -> tuple[int, ...]:
        """Start members and return their process numbers, in order. They are not up yet: they register.

        Raises:
            LaunchError: one could not be started; those that could are running.
            ShuttingDown: the node is ending.
        """
        if self._closing:
            raise ShuttingDown(f"node {self._config.node_name} is ending and starts nothing", executed="no")
        results = await asyncio.gather(*map(self._start_member, specs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(pid for pid in results if isinstance(pid, int))

    @rpc
    async def stop_members(self, members: tuple[MemberKey, ...], grace_s: float) -> None:
        """SIGTERM, later SIGKILL; returns when they are gone. Members that are gone already are no error."""
        wanted = set(members)
        chosen = [child for child, spec in self._members.items() if _key(spec) in wanted]
        await self._stop(chosen, grace_s)

    @rpc
    async def signal(self, member: MemberKey | None, number: int) -> None:
        """Send a signal to a member that lives, or to this agent itself: a rehearsal of a failure."""
        if member is None:
            os.kill(os.getpid(), number)
        for child, spec in self._members.items():
            if _key(spec) == member and child in self._table:
                logger.warning("rehearsal: signal %d to %s (pid %d)", number, child.name, child.pid)
                os.kill(child.pid, number)

    @rpc
    async def reserve_port(self, instead_of: int | None = None) -> int:
        """A port of this node's address (loopback in a job of one machine) that no ``bind(0)`` gets until the node
        ends, but that a server which sets SO_REUSEADDR (torch's store does) can bind: nobody listens on it.
        ``instead_of`` is given up for it."""
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((self._config.host or "127.0.0.1", 0))
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

    @rpc(concurrent=4)
    async def stacks(self) -> dict[MemberKey, str]:
        """The Python stacks of the node's members, or for each the reason why there are none."""
        members = list(self._members.items())
        files = [stacks_file(self._config.socket_dir, spec.role, spec.rank) for _, spec in members]
        texts = await asyncio.gather(
            *(dump_stacks(child.pid, file) for (child, _), file in zip(members, files, strict=True))
        )
        return {_key(spec): text for (_, spec), text in zip(members, texts, strict=True)}

    @rpc(concurrent=4096)
    async def lease_devices(self, key: MemberKey, timeout_s: float) -> LeaseAnswer:
        """Give a member its devices when no other role has them; called by the member, in ``device_lease()``."""
        specs = [spec for spec in self._members.values() if spec.role == key[0]]
        own = [spec for spec in specs if _key(spec) == key]
        if not own:
            raise ShuttingDown(f"{key[0]}:{key[1]} is no member on node {self._config.node_name}", executed="no")
        turn = specs if own[0].backend == "elastic" else own
        together = {_key(spec): tuple(device.uuid for device in spec.devices) for spec in turn}
        return await self._leases.take(key, together, timeout_s)

    @rpc(concurrent=64)
    async def return_devices(self, key: MemberKey) -> None:
        self._leases.give_back(key)

    @rpc(concurrent=4)
    async def examine(self, members: tuple[MemberKey, ...]) -> tuple[MemberStack, ...]:
        """What the processes of these members do, whatever keeps them busy; those that are gone are left out."""
        wanted = set(members)
        found = [(child, spec) for child, spec in self._members.items() if _key(spec) in wanted]
        folder = self._config.socket_dir
        return tuple(await asyncio.gather(*(examine(spec, child.pid, folder) for child, spec in found)))

    @rpc
    async def shutdown(self, grace_s: float) -> ExitReport:
        """End all members and what they left; the agent ends soon after (with the master, where it runs)."""
        report = await self._end_members(grace_s)
        if self._master_child is None or self._master_child not in self._table:
            self._loop.call_later(FLUSH_S, self._end, _Over("shutdown"))
        return report

    # Members

    async def _start_member(self, spec: WorkerSpec) -> int:
        spec = self._completed(spec)
        started = await self._spawner.start_member(spec)
        self._members[started.child] = spec
        logger.info(
            "%s:%d.%d is pid %d (%s, %.0f ms)",
            spec.role, spec.rank, spec.incarnation, started.child.pid, started.way, started.took_s * 1000,
        )  # fmt: skip
        if started.child.ended.done():  # it died before its number was known here
            self._member_ended(started.child, started.child.ended.result())
        elif self._closing:
            self._do(self._stop([started.child], 0.0))
        return started.child.pid

    def _completed(self, spec: WorkerSpec) -> WorkerSpec:
        """What only this node knows."""
        config = self._config
        env = {**self._network_env(), **spec.env} if "MASTER_ADDR" in spec.env else spec.env
        return replace(
            spec, key_hex=config.key_hex, master_endpoint=config.master_endpoint, socket_dir=config.socket_dir,
            host=config.host, env=env, nvml=config.nvml, agent_endpoint=self._runtime.endpoint or "",
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
        if child is self._master_child:
            crashed = ended.exit_code != 0 and not self._closing
            self._end(_Over(f"the master {ended.describe()}", int(crashed)))
        elif child in self._members:
            self._member_ended(child, ended)
        elif child in self._spawner.service and not self._closing:
            logger.warning("the %s process ended; workers start without it", child.name)
        # Its shared memory goes with it, so that nothing stays in /dev/shm while the job lives on.
        self._do(self._remove_segments(child.pid, child.name))
        self._do(self._end_orphans(child.name))

    def _member_ended(self, child: Child, ended: Ended) -> None:
        spec = self._members.pop(child)
        self._leases.gone(_key(spec))
        info = ExitInfo(
            role=spec.role,
            rank=spec.rank,
            incarnation=spec.incarnation,
            pid=ended.pid,
            exit_code=ended.exit_code,
            signal=ended.signal,
            at=ended.at,
            node_rank=self._config.node_rank,
            hostname=os.uname().nodename,
            log_path=spec.log_path,
            last_log_lines=last_lines(spec.log_path, CRASH_LINES if ended.signal in CRASHES else LAST_LINES),
            peak_rss_bytes=ended.peak_rss_bytes,
            oom=self._oom.look(ended.peak_rss_bytes) if ended.signal == signal.SIGKILL else "",
        )
        self._do(self._report(info))

    async def _report(self, info: ExitInfo) -> None:
        if self._master_child is not None and self._master_child not in self._table:
            return
        try:
            await self._master.options(timeout_s=REPORT_WAIT_S).call("member_exited", info.node_rank, info)
        except CallError as error:
            logger.error("the master was not told that %s:%d %s: %s", info.role, info.rank, info.describe(), error)

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
        self._do(self._register())
        over = await self._over
        self._loop.remove_reader(0)
        if self._watch is not None:
            self._watch.cancel()
        logger.info("node %s ends: %s", self._config.node_name, over.why)
        report = await self._end_members(over.grace_s)
        await self._end_master()
        await self._settle()
        with suppress(BrokenPipeError):  # the guardian was killed
            os.write(1, json.dumps(asdict(report)).encode() + b"\n")
        return over.code

    async def _register(self) -> None:
        own, public = self._runtime.endpoint, self._runtime.public_endpoint
        assert own is not None
        # The master is on the first node, whose socket folder it sees.
        info = node_info(self._config, own if self._config.start_master or public is None else public)
        try:
            await self._master.options(timeout_s=REGISTER_WAIT_S).call("register_agent", info)
        except CallError as error:
            self._end(_Over(f"the master did not take this node: {error}", 1))
            return
        watch = DeviceWatch(self._config.node_rank, info.devices, self._config.nvml, self._device_is_bad)
        self._watch = self._loop.create_task(watch.run())

    async def _device_is_bad(self, bad: DeviceBad) -> None:
        logger.error("%s", bad.describe())
        try:
            for uuid in bad.uuids:
                master = self._master.options(timeout_s=REPORT_WAIT_S)
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
        survivors = [child for child in self._members if child in self._table]
        stuck = tuple(Leftover("process", f"pid {child.pid} ({child.name})", False) for child in survivors)
        return ExitReport(self._config.node_rank, self._table.started, (*self._leftovers, *stuck))

    async def _end_master(self) -> None:
        """It may be about to end by itself, and have files to close."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._master_child is not None and self._master_child in self._table:
            await asyncio.wait([self._master_child.ended], timeout=MASTER_WAIT_S)
            await self._stop([self._master_child], SERVICE_GRACE_S)

    async def _settle(self) -> None:
        """Let reports that are under way arrive, but not for long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.5)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._watch] if self._watch else []), return_exceptions=True)
        self._table.close()


def _key(spec: WorkerSpec) -> MemberKey:
    return (spec.role, spec.rank, spec.incarnation)


def _runs(process: ownership.Process) -> bool:
    found = ownership.read_process(process.pid)
    return found is not None and found == process and found.running


def run_agent(config: AgentConfig, started: Boot) -> int:
    """Be the agent; returns the exit code. Whatever happens, nothing is left below this process."""
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    guardian = os.getppid()
    try:
        code = uvloop.run(_main(config, started))
    except LaunchError as error:
        logger.error("%s", error)
        code = 1
    finally:
        statuses: dict[int, int] = {}
        ended, running = ownership.kill_descendants(2.0, statuses)
        if ended or running:
            logger.warning("ended at last: %s; still running: %s", ended, running)
        if os.getppid() != guardian:
            _clean_up_for_the_guardian(config)
    return code


async def _main(config: AgentConfig, started: Boot) -> int:
    key = bytes.fromhex(config.key_hex)
    name = f"agent:{config.node_rank}"
    public = f"tcp://{join_host_port(config.host, '*')}" if config.host else None
    async with Runtime.open(
        name=name, key=key, socket_dir=config.socket_dir, public=public, job_id=config.job_id,
        node_rank=config.node_rank,
    ) as runtime:  # fmt: skip
        agent = Agent(config, runtime, started)
        runtime.serve(AGENT, agent, inline=True)
        return await agent.live()


def _clean_up_for_the_guardian(config: AgentConfig) -> None:
    """The guardian was killed: its other duties are the agent's now."""
    ownership.remove_shared_memory(config.job_id, config.node_rank)
    ownership.remove_folder(config.socket_dir, ownership.hold_folder(config.socket_dir))
    ownership.remove_job_file(config.job_path, config.socket_dir)
