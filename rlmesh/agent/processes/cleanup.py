"""What the processes of a node leave behind when they end: other processes, shared memory. It is ended and noted."""

from __future__ import annotations

import asyncio
import logging

from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.member_groups import MemberGroups
from rlmesh.agent.processes.process_table import ProcessTable
from rlmesh.agent.protocol import AgentConfig, Leftover, WorkerSpec
from rlmesh.memory.layout import remove_segments_of_process

__all__ = ["Leavings"]

logger = logging.getLogger(__name__)


class Leavings:
    """Of one node.

    Attributes:
        found: what was left so far, with whether it is gone.
        groups: the members' control groups.
    """

    def __init__(self, config: AgentConfig, table: ProcessTable) -> None:
        self._config, self._table = config, table
        self.groups = MemberGroups(config.job_id, config.node_rank)
        self.found: list[Leftover] = []

    async def remove_segments(self, pid: int, name: str) -> None:
        """Those of a process that has ended, so that nothing stays in /dev/shm while the job lives on."""
        job_id, node_rank = self._config.job_id, self._config.node_rank
        try:
            removed = await asyncio.to_thread(remove_segments_of_process, job_id, node_rank, pid)
        except OSError as error:
            logger.warning("shared memory that %s (pid %d) may have left was not looked for: %s", name, pid, error)
            return
        if removed:
            logger.info("%s (pid %d) left %d segments of shared memory, which are removed", name, pid, removed)

    async def end_orphans(self, left_by: str) -> None:
        """Processes whose own parents have ended, whosever they were; ``left_by``: who has just ended."""
        for process, owner in (await self._table.end_orphans(left_by)).items():
            await self.remove_segments(process.pid, str(process))
            self._note(process, owner)

    async def end_of(self, left_by: str, spec: WorkerSpec | None) -> None:
        """What a process left: by its descent, with a moment to end in good order, then by its control group."""
        await self.end_orphans(left_by)
        for process in await self.groups.end(spec) if spec is not None else ():
            self._note(process, left_by)

    def _note(self, process: ownership.Process, owner: str) -> None:
        found = ownership.read_process(process.pid)
        runs = found is not None and found == process and found.running
        self.found.append(Leftover("process", f"{process} left by {owner}", not runs))

    async def all(self) -> tuple[Leftover, ...]:
        """What was left in all, when the node is over."""
        if not await self.groups.close():
            self.found.append(Leftover("control_group", "of the node: a process in it does not end", False))
        return tuple(self.found)
