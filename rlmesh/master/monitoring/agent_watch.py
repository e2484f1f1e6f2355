"""Detection of lost agents: by the operating system where possible, else by the agent's lease."""

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
"""Seconds that the members of a dead agent may take to end; the kernel or the guardian kills them."""


class AgentWatch:
    """Watches the agents of one job.

    Args:
        job_id: marks the job's processes.
        lost: called with a node's rank and how its agent was lost, when nothing of the job can run there any more.
        members_of: returns the pids of a node's members.
        lease_s: length of the agents' leases; 0: no leases.
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
        self._senders: dict[int, str] = {}
        self._replaced: set[str] = set()
        self._refused: set[str] = set()
        self._fds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, nodes: Iterable[NodeInfo]) -> None:
        """Watch nodes that a previous master knew: each must return, or is lost."""
        for node in nodes:
            self.registered(node)

    def registered(self, node: NodeInfo, sender: str = "") -> None:
        """Watch an agent that registered; its lease begins. ``sender``: its identity, empty if it is not known."""
        if sender:
            self._senders[node.node_rank] = sender
        self._given_up.discard(node.node_rank)
        self.renew(node.node_rank)
        self._suspected.pop(node.node_rank, None)
        is_here = node.machine == machine_id()
        if is_here and self._pids.get(node.node_rank) == node.agent_pid:
            return
        self._unwatch(node.node_rank)
        if not is_here:
            return
        mark = ownership.read_mark(node.agent_pid, ownership.NODE_MARK)
        if mark and mark != f"{self._job_id}/{node.node_rank}":
            self._end(node, "has ended")  # its pid is in use again
            return
        try:
            fd = os.pidfd_open(node.agent_pid)
        except OSError:
            self._end(node, "has ended")
            return
        self._fds[node.node_rank], self._pids[node.node_rank] = fd, node.agent_pid
        asyncio.get_running_loop().add_reader(fd, self._ended, node)

    def is_given_up(self, node_rank: int) -> bool:
        """True if a node was given up here, even if the job manager does not know it yet."""
        return node_rank in self._given_up

    def may_register(self, node_rank: int, sender: str, *, runs: bool) -> bool:
        """True if an agent may have the node; called when it asks to. ``runs``: members run there.

        An agent that comes in another one's place ends the lease of that one, and must wait until the node is given up:
        the other one may still run members. Whoever was replaced never has the node again. When it asks a second time,
        it knows that it has no lease, and starts nothing any more.
        """
        before = self._senders.get(node_rank, sender)
        if sender in self._replaced:
            if sender == before and sender in self._refused and not runs and node_rank not in self._given_up:
                self.ended(node_rank, "was replaced by another one", proven=True)
            self._refused.add(sender)
            return False
        if sender == before:
            return True
        self._replaced.add(before)
        return not self._leased or node_rank in self._given_up

    def has_node(self, node_rank: int, sender: str) -> bool:
        """True unless the node is another agent's, or another one has come in the place of this one."""
        return self._senders.get(node_rank, sender) == sender and sender not in self._replaced

    def renew(self, node_rank: int) -> None:
        """Renew an agent's lease, unless its node was given up."""
        if self._leased:
            self._leases.renew(node_rank, self._clock())

    def check(self) -> None:
        """Give up the nodes whose leases are long over."""
        for node_rank, silent_s in self._leases.silent(self._clock()).items():
            self._leases.forget(node_rank)
            self._given_up.add(node_rank)
            self._unwatch(node_rank)
            why = self._suspected.pop(node_rank, "its lease is over")
            self._lost(node_rank, f"gave no sign of life for {silent_s:.0f} s; {why}")

    def ended(self, node_rank: int, how: str, *, proven: bool) -> None:
        """Handle a report that a node has ended. Without proof, the node is lost only when its lease runs out."""
        if self._leased and not proven:
            self._suspected[node_rank] = how
        else:
            self._leases.forget(node_rank)
            self._given_up.add(node_rank)
            self._unwatch(node_rank)
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
        """Report the node as lost once its members have ended, which may be a moment after their agent."""
        self._leases.forget(node.node_rank)
        self._given_up.add(node.node_rank)
        task = asyncio.get_running_loop().create_task(self._report_when_empty(node.node_rank, how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_when_empty(self, node_rank: int, how: str) -> None:
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
