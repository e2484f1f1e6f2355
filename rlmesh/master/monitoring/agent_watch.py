"""How the master knows that an agent is lost: from the operating system where it can, else by the agent's lease."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from rlmesh.agent.node_description import machine_id
from rlmesh.agent.node_lease import suspend_aware_clock
from rlmesh.agent.processes import ownership
from rlmesh.master.decisions.silent_nodes import NodeLeases
from rlmesh.placement.machine.inventory import NodeInfo

MEMBERS_END_S = 5.0
"""How long the members of an agent that died may take to end: the kernel kills them, or the guardian does."""


class AgentWatch:
    """Watches the agents of one job.

    Args:
        job_id: marks the job's processes.
        lost: called with a node's rank and how its agent was lost, when nothing of the job can run there any more.
        members_of: the process numbers of a node's members.
        lease_s: the length of the agents' leases; 0: they have none.
    """

    def __init__(
        self, job_id: str, lost: Callable[[int, str], None], members_of: Callable[[int], Iterable[int]], *,
        lease_s: float, clock: Callable[[], float] = suspend_aware_clock,
    ) -> None:  # fmt: skip
        self._job_id, self._lost, self._members_of = job_id, lost, members_of
        self._leased, self._clock = lease_s > 0, clock
        self._leases = NodeLeases((), clock(), lease_s)
        self._suspected: dict[int, str] = {}
        self._given_up: set[int] = set()
        self._fds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, nodes: Iterable[NodeInfo]) -> None:
        """Nodes that another master knew: each must come back, or is lost."""
        for node in nodes:
            self.found(node)

    def found(self, node: NodeInfo) -> None:
        """An agent registered; its lease begins."""
        self._given_up.discard(node.node_rank)
        self.renew(node.node_rank)
        self._suspected.pop(node.node_rank, None)
        if node.machine != machine_id() or self._pids.get(node.node_rank) == node.agent_pid:
            return
        self._unwatch(node.node_rank)
        mark = ownership.read_mark(node.agent_pid, ownership.NODE_MARK)
        if mark and mark != f"{self._job_id}/{node.node_rank}":
            self._end(node, "has ended")  # its number is in use again
            return
        try:
            fd = os.pidfd_open(node.agent_pid)
        except OSError:
            self._end(node, "has ended")
            return
        self._fds[node.node_rank], self._pids[node.node_rank] = fd, node.agent_pid
        asyncio.get_running_loop().add_reader(fd, self._ended, node)

    def gave_up(self, node_rank: int) -> bool:
        """Whether a node was given up: its members may be on their way elsewhere, though nobody else knows yet."""
        return node_rank in self._given_up

    def renew(self, node_rank: int) -> None:
        """An agent gave a sign of life; not for a node that was given up."""
        if self._leased:
            self._leases.renew(node_rank, self._clock())

    def look(self) -> None:
        """Give up the nodes whose leases are long over."""
        for node_rank, silent_s in self._leases.silent(self._clock()).items():
            self._leases.forget(node_rank)
            self._given_up.add(node_rank)
            self._unwatch(node_rank)
            why = self._suspected.pop(node_rank, "its lease is over")
            self._lost(node_rank, f"gave no sign of life for {silent_s:.0f} s; {why}")

    def ended(self, node_rank: int, how: str, *, proven: bool) -> None:
        """Somebody says that a node has ended. Where that is not proven, its lease must run out before it is lost."""
        if self._leased and not proven:
            self._suspected[node_rank] = how
        else:
            self._leases.forget(node_rank)
            self._given_up.add(node_rank)
            self._lost(node_rank, how)

    async def close(self) -> None:
        for node_rank in list(self._fds):
            self._unwatch(node_rank)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, node: NodeInfo) -> None:
        self._unwatch(node.node_rank)
        self._end(node, f"(pid {node.agent_pid} on {node.hostname}) died")

    def _end(self, node: NodeInfo, how: str) -> None:
        """Nothing of the job may run there any more when this is told: its members die with the agent, but not in
        the same moment."""
        self._leases.forget(node.node_rank)
        self._given_up.add(node.node_rank)
        task = asyncio.get_running_loop().create_task(self._tell_when_empty(node.node_rank, how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_when_empty(self, node_rank: int, how: str) -> None:
        processes = filter(None, map(ownership.read_process, filter(None, self._members_of(node_rank))))
        mark = f"{self._job_id}/{node_rank}"
        running = [p for p in processes if p.running and ownership.read_mark(p.pid, ownership.NODE_MARK) == mark]
        from rlmesh.agent.processes.process_table import wait_processes

        await wait_processes(running, MEMBERS_END_S)
        self._lost(node_rank, how)

    def _unwatch(self, node_rank: int) -> None:
        fd = self._fds.pop(node_rank, None)
        self._pids.pop(node_rank, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
