"""The members of a node: how they are started and ended, which run, and what is said of those that ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlmesh.agent.monitoring.logs import LAST_LINES, last_lines
from rlmesh.agent.processes.cleanup import Leavings
from rlmesh.agent.processes.error_file import read_error_file
from rlmesh.agent.processes.oom import OomCounters
from rlmesh.agent.processes.process import Ended
from rlmesh.agent.processes.process_table import Child, ProcessTable, stop
from rlmesh.agent.processes.spawner import Spawner
from rlmesh.agent.protocol import AgentConfig, Leftover, MemberProcess, WorkerSpec
from rlmesh.job.status import ExitInfo, MemberStack
from rlmesh.runtime.calling.peer_status import state_letter
from rlmesh.runtime.serving.activity_board import board_path, does_not_answer, look_at

__all__ = ["MemberKey", "NodeMembers"]

logger = logging.getLogger(__name__)

CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
YOUNG_S = 10.0
CRASH_LINES = 60
"""After these signals the log ends with the stacks of all threads; what matters stands at their head."""

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""On one machine NCCL finds its way by itself."""

MemberKey = tuple[str, int, int]
"""Role, rank, incarnation."""


class NodeMembers:
    """Those of one node. Belongs to the agent's loop.

    Args:
        endpoint: the agent's own, for its members.
        env: what every worker of the job starts from.
        ended: told of each member whose process has ended, once.
        unwanted: asked after each start: whether nothing may run here any longer.
        do: does something beside, which ends with the agent.
    """

    def __init__(
        self, config: AgentConfig, endpoint: str, env: Mapping[str, str], table: ProcessTable, spawner: Spawner,
        leavings: Leavings, *, ended: Callable[[ExitInfo], None], unwanted: Callable[[], bool],
        do: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:  # fmt: skip
        self._config, self._endpoint, self._env = config, endpoint, env
        self._table, self._spawner, self._leavings = table, spawner, leavings
        self._ended, self._unwanted, self._do = ended, unwanted, do
        self._interface = None if config.host else "lo"
        self._specs: dict[Child, WorkerSpec] = {}
        self._started_at: dict[Child, float] = {}
        self._starting: dict[MemberKey, asyncio.Task[int]] = {}
        self._oom = OomCounters()

    def __iter__(self) -> Iterator[tuple[Child, WorkerSpec]]:
        """The processes that run, each with what it was told to be."""
        return iter(list(self._specs.items()))

    def spec_of(self, child: Child) -> WorkerSpec | None:
        return self._specs.get(child)

    def living_in(self, keys: Collection[MemberKey]) -> list[tuple[Child, WorkerSpec]]:
        """The processes in which one of these members lives."""
        return [(child, spec) for child, spec in self if any(member.key in keys for member in spec.members)]

    def running(self) -> list[MemberProcess]:
        """The members that run, or whose start is under way."""
        running = [MemberProcess(*member.key, child.pid) for child, spec in self for member in spec.members]
        return running + [MemberProcess(*key, 0) for key in self._starting]

    # Start

    async def start(self, specs: Sequence[WorkerSpec]) -> tuple[int, ...]:
        """Start members and return their process numbers, in order. Those that run already are not started twice.

        Raises:
            LaunchError: one could not be started; those that could are running.
        """
        results = await asyncio.gather(*map(self._start_once, specs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(pid for pid in results if isinstance(pid, int))

    async def _start_once(self, spec: WorkerSpec) -> int:
        """A start goes on when the master that asked for it died: a fork is not to be left half-way, and the next
        master asks again."""
        key = spec.key
        for child, other in self:
            if other.key == key:
                return child.pid
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
        spec = replace(self._completed(spec), cgroup=self._leavings.groups.make(spec))
        started = await self._spawner.start_member(spec)
        self._specs[started.child] = spec
        self._started_at[started.child] = time.monotonic()
        logger.info(
            "%s:%d.%d is pid %d (%s, %.0f ms)",
            spec.role, spec.rank, spec.incarnation, started.child.pid, started.way, started.took_s * 1000,
        )  # fmt: skip
        if started.child.ended.done():  # it died before its number was known here
            self.process_ended(started.child, started.child.ended.result())
        elif self._unwanted():
            self._do(self.stop([started.child], 0.0))
        return started.child.pid

    def _completed(self, spec: WorkerSpec) -> WorkerSpec:
        """What only this node knows."""
        config = self._config
        env = {**self._network_env(), **spec.env} if "MASTER_ADDR" in spec.env else spec.env
        return replace(
            spec, key_hex=config.key_hex, master_endpoint=config.master_endpoint, socket_dir=config.socket_dir,
            host=config.host, env=env, nvml=config.nvml, agent_endpoint=self._endpoint,
            fused=tuple(map(self._completed, spec.fused)),
        )  # fmt: skip

    def _network_env(self) -> dict[str, str]:
        """The interface that process groups use: left to themselves they ask what the host's name resolves to, which
        may be nothing, or an address that others do not reach."""
        if self._interface is None:
            from rlmesh.runtime.transport.inet import interface_of

            self._interface = interface_of(self._config.host or "127.0.0.1")
        names = _INTERFACE_VARIABLES if self._config.host else _INTERFACE_VARIABLES[:1]
        return {name: self._interface for name in names if self._interface and name not in self._env}

    # What they do

    async def examine(self, keys: Collection[MemberKey], silent: Collection[MemberKey]) -> tuple[MemberStack, ...]:
        """See the agent's method of this name."""
        from rlmesh.agent.monitoring.examination import examine

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
        """Members that do not answer, with why, as far as it can be seen from outside."""
        found: dict[MemberKey, str] = {}
        for child, spec in self:
            seen = look_at(board_path(self._config.socket_dir, f"{spec.role}:{spec.rank}"))
            if why := does_not_answer(state_letter(child.pid), child.pid, seen):
                found |= {member.key: why for member in spec.members}
        return found

    # End

    async def started(self, keys: Collection[MemberKey] | None = None) -> None:
        """Returns when the starts of these members that are under way, or all such starts, have come to something."""
        under_way = [task for key, task in self._starting.items() if keys is None or key in keys]
        await asyncio.gather(*under_way, return_exceptions=True)

    async def stop(self, children: Sequence[Child], grace_s: float) -> None:
        """SIGTERM, later SIGKILL; returns when they are gone. Those that are gone already are no error."""
        await stop(self._table, children, grace_s)

    async def stop_all(self, grace_s: float) -> None:
        await self.stop([child for child, _ in self], grace_s)

    def process_ended(self, child: Child, ended: Ended) -> None:
        """Say of each member that lived in it how it ended, with its last words."""
        spec = self._specs.pop(child)
        noted, traceback = read_error_file(spec.env)
        lived_s = time.monotonic() - self._started_at.pop(child)
        if lived_s < YOUNG_S and ended.exit_code:
            self._spawner.failed_young(child.name)
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
        """Those that not even SIGKILL ended."""
        survivors = [child for child, _ in self if child in self._table]
        return tuple(Leftover("process", f"pid {child.pid} ({child.name})", False) for child in survivors)
