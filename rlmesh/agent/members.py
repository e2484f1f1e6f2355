"""The members of a node: their start and end, the running ones, and reports of the ended ones."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlmesh.agent.monitoring.logs import LAST_LINES, last_lines
from rlmesh.agent.processes.cleanup import Cleanup
from rlmesh.agent.processes.error_file import read_error_file
from rlmesh.agent.processes.oom import OomCounters
from rlmesh.agent.processes.process import Ended
from rlmesh.agent.processes.process_table import Child, ProcessTable, stop
from rlmesh.agent.processes.spawner import Spawner
from rlmesh.agent.protocol import AgentConfig, Leftover, MemberProcess, WorkerSpec
from rlmesh.agent.worker.stacks import dump_stacks, stacks_file
from rlmesh.job.status import ExitInfo, MemberStack
from rlmesh.runtime.calling.peer_status import state_letter
from rlmesh.runtime.serving.activity_board import board_path, does_not_answer, look_at

__all__ = ["MemberKey", "NodeMembers"]

logger = logging.getLogger(__name__)

CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
EARLY_S = 10.0
"""A member that fails within this time may have inherited the cause by its fork."""
CRASH_LINES = 60
"""After these signals the log ends with the stacks of all threads; the important lines are the first of them."""

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""NCCL needs no interface on one machine."""

STACKS_WAIT_S = 1.0
_STATES = {
    "R": "runs", "S": "sleeps", "D": "waits in the kernel", "T": "is stopped", "t": "is traced", "Z": "has ended",
}  # fmt: skip

MemberKey = tuple[str, int, int]
"""Role, rank, incarnation."""


class NodeMembers:
    """The members of one node. Belongs to the agent's loop.

    Args:
        endpoint: the agent's endpoint, for its members.
        env: the environment that every worker of the job starts from.
        ended: called once for each member whose process has ended.
        unwanted: called after each start: True if nothing may run here any longer.
        do: runs a coroutine in a task that ends with the agent.
    """

    def __init__(
        self, config: AgentConfig, endpoint: str, env: Mapping[str, str], table: ProcessTable, spawner: Spawner,
        cleanup: Cleanup, *, ended: Callable[[ExitInfo], None], unwanted: Callable[[], bool],
        do: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:  # fmt: skip
        self._config, self._endpoint, self._env = config, endpoint, env
        self._table, self._spawner, self._cleanup = table, spawner, cleanup
        self._ended, self._unwanted, self._do = ended, unwanted, do
        self._interface = None if config.host else "lo"
        self._specs: dict[Child, WorkerSpec] = {}
        self._started_at: dict[Child, float] = {}
        self._starting: dict[MemberKey, asyncio.Task[int]] = {}
        self._pids: dict[MemberKey, int] = {}
        self._oom = OomCounters()

    def __iter__(self) -> Iterator[tuple[Child, WorkerSpec]]:
        """Iterate over the running processes and their specifications."""
        return iter(list(self._specs.items()))

    def spec_of(self, child: Child) -> WorkerSpec | None:
        return self._specs.get(child)

    def living_in(self, keys: Collection[MemberKey]) -> list[tuple[Child, WorkerSpec]]:
        """The processes in which one of these members runs."""
        return [(child, spec) for child, spec in self if any(member.key in keys for member in spec.members)]

    def running(self) -> list[MemberProcess]:
        """Members that run, or whose start is under way."""
        running = [MemberProcess(*member.key, child.pid) for child, spec in self for member in spec.members]
        return running + [MemberProcess(*key, 0) for key in self._starting]

    # Start

    async def start(self, specs: Sequence[WorkerSpec]) -> tuple[int, ...]:
        """Start members and return their process numbers, in order. A member that runs, or has run and ended, is not
        started again: an order is repeated when its answer is lost.

        Raises:
            LaunchError: a member could not be started; the others are running.
        """
        results = await asyncio.gather(*map(self._start_once, specs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(pid for pid in results if isinstance(pid, int))

    async def _start_once(self, spec: WorkerSpec) -> int:
        """Start a member unless it was started before. The start goes on if the master that asked for it dies: a fork
        must not be left half-way, and the next master asks again."""
        key = spec.key
        if key in self._pids:
            return self._pids[key]
        task = self._starting.get(key)
        if task is None:
            task = self._starting[key] = asyncio.get_running_loop().create_task(self._start(spec))
            task.add_done_callback(partial(self._was_started, key))
        return await asyncio.shield(task)

    def _was_started(self, key: MemberKey, task: asyncio.Task[int]) -> None:
        del self._starting[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s:%d.%d was not started: %s", *key, error)

    async def _start(self, spec: WorkerSpec) -> int:
        spec = replace(self._completed(spec), cgroup=self._cleanup.groups.make(spec))
        started = await self._spawner.start_member(spec)
        self._specs[started.child] = spec
        self._pids[spec.key] = started.child.pid
        self._started_at[started.child] = time.monotonic()
        logger.info(
            "%s:%d.%d is pid %d (%s, %.0f ms)",
            spec.role, spec.rank, spec.incarnation, started.child.pid, started.way, started.took_s * 1000,
        )  # fmt: skip
        if started.child.ended.done():  # it died before its process number was known here
            self.process_ended(started.child, started.child.ended.result())
        elif self._unwanted():
            self._do(self.stop([started.child], 0.0))
        return started.child.pid

    def _completed(self, spec: WorkerSpec) -> WorkerSpec:
        """The specification with the values that only this node has."""
        config = self._config
        env = {**self._network_env(), **spec.env} if "MASTER_ADDR" in spec.env else spec.env
        return replace(
            spec, key_hex=config.key_hex, master_endpoint=config.master_endpoint, socket_dir=config.socket_dir,
            host=config.host, env=env, nvml=config.nvml, agent_endpoint=self._endpoint,
            fused=tuple(map(self._completed, spec.fused)),
        )  # fmt: skip

    def _network_env(self) -> dict[str, str]:
        """The interface for process groups: without it they resolve the host's name, which may give nothing, or an
        address that others cannot reach."""
        if self._interface is None:
            from rlmesh.runtime.transport.inet import interface_of

            self._interface = interface_of(self._config.host or "127.0.0.1")
        names = _INTERFACE_VARIABLES if self._config.host else _INTERFACE_VARIABLES[:1]
        return {name: self._interface for name in names if self._interface and name not in self._env}

    # What they do

    async def examine(self, keys: Collection[MemberKey], silent: Collection[MemberKey]) -> tuple[MemberStack, ...]:
        """See the agent's method of this name."""
        found = self.living_in(keys)
        folder = self._config.socket_dir
        seen = await asyncio.gather(
            *(examine(spec, child.pid, folder, any(m.key in silent for m in spec.members)) for child, spec in found)
        )
        return tuple(
            replace(stack, role=member.role, rank=member.rank, incarnation=member.incarnation)
            for stack, (_, spec) in zip(seen, found, strict=True)
            for member in spec.members
            if member.key in keys
        )

    def silent(self) -> dict[MemberKey, str]:
        """Members that do not answer, with the reason, as seen from outside."""
        found: dict[MemberKey, str] = {}
        for child, spec in self:
            seen = look_at(board_path(self._config.socket_dir, f"{spec.role}:{spec.rank}"))
            if why := does_not_answer(state_letter(child.pid), child.pid, seen):
                found |= {member.key: why for member in spec.members}
        return found

    # End

    async def started(self, keys: Collection[MemberKey] | None = None) -> None:
        """Wait until the starts of these members (None: all) that are under way have ended."""
        under_way = [task for key, task in self._starting.items() if keys is None or key in keys]
        await asyncio.gather(*under_way, return_exceptions=True)

    async def stop(self, children: Sequence[Child], grace_s: float) -> None:
        """Send SIGTERM, later SIGKILL; return when the processes are gone. Processes already gone are no error."""
        await stop(self._table, children, grace_s)

    async def stop_all(self, grace_s: float) -> None:
        await self.stop([child for child, _ in self], grace_s)

    def process_ended(self, child: Child, ended: Ended) -> None:
        """Report for each member of an ended process how it ended, with the last lines of its log."""
        spec = self._specs.pop(child)
        noted, traceback = read_error_file(spec.env)
        lived_s = time.monotonic() - self._started_at.pop(child)
        if lived_s < EARLY_S and ended.exit_code:
            self._spawner.failed_early(child.name)
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
            noted=noted,
            noted_traceback=traceback,
        )
        for member in spec.members:
            self._ended(replace(info, role=member.role, rank=member.rank, incarnation=member.incarnation))

    def stuck(self) -> tuple[Leftover, ...]:
        """Member processes that survived SIGKILL."""
        survivors = [child for child, _ in self if child in self._table]
        return tuple(Leftover("process", f"pid {child.pid} ({child.name})", False) for child in survivors)


async def examine(spec: WorkerSpec, pid: int, socket_dir: str, silent: bool) -> MemberStack:
    """Examine a member of this node. ``silent``: the member did not answer when asked for its stacks, so a signal
    brings them; otherwise the result has none."""
    text = await dump_stacks(pid, stacks_file(socket_dir, spec.role, spec.rank), STACKS_WAIT_S) if silent else ""
    state, cpu_s = _state(pid)
    wchan = _read(f"/proc/{pid}/wchan").strip("0\n")
    return MemberStack(spec.role, spec.rank, spec.incarnation, pid, state, wchan, cpu_s, text)


def _state(pid: int) -> tuple[str, float]:
    """The state of the process, and the processor time that it has used, in seconds."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 13:
        return "is gone", 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    return _STATES.get(fields[0], f"is in state {fields[0]}"), (int(fields[11]) + int(fields[12])) / ticks


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
