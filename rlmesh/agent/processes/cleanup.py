"""Cleanup after the processes of a node: leftover processes and shared memory are ended, removed and reported."""

from __future__ import annotations

import asyncio
import logging
import os

from rlmesh.agent.processes import control_groups, ownership
from rlmesh.agent.processes.ownership import Process
from rlmesh.agent.processes.process_table import ProcessTable
from rlmesh.agent.protocol import AgentConfig, Leftover, WorkerSpec
from rlmesh.memory.layout import remove_segments_of_process

__all__ = ["Cleanup", "MemberGroups"]

logger = logging.getLogger(__name__)


class MemberGroups:
    """Makes a group for each member and ends it. Nothing here fails: without groups, members run in the agent's group.

    Args:
        own: this process's group, in which groups may be made; empty if none may.
    """

    def __init__(self, job_id: str, node_rank: int, own: str | None = None) -> None:
        why = ""
        if own is None:
            own, why = control_groups.own_group()
        self._own = own
        self._folder = control_groups.node_group(own, job_id, node_rank) if own else ""
        self._limits = False
        if self._folder and (why := self._make_node_group()):
            self._folder = ""
        if why:
            logger.info("members have no control groups: %s", why)

    def __bool__(self) -> bool:
        return bool(self._folder)

    def _make_node_group(self) -> str:
        control_groups.sweep(self._own, lambda mark: bool(ownership.marked(mark)))
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            return f"{self._folder}: {error.strerror}"
        try:
            # The kernel refuses this for a group that has processes itself, except the root group. Members of such a
            # group run without memory limits.
            for folder in (self._own, self._folder):
                _write(f"{folder}/cgroup.subtree_control", "+memory")
            self._limits = True
        except OSError as error:
            logger.info("members' memory is not limited by control groups: %s: %s", self._own, error.strerror)
        return ""

    def make(self, spec: WorkerSpec) -> str:
        """Make a member's group and return its folder, which the process must enter; empty without groups."""
        if not self._folder:
            return ""
        folder = self.folder_of(spec)
        try:
            os.makedirs(folder, exist_ok=True)
            if self._limits and spec.memory_limit_bytes:
                _write(f"{folder}/memory.max", str(spec.memory_limit_bytes))
                # Kill the whole group: a member that lost only some of its processes would hang.
                _write(f"{folder}/memory.oom.group", "1")
        except OSError as error:
            logger.warning("%s has no control group: %s: %s", spec.name, folder, error.strerror)
            return ""
        return folder

    def folder_of(self, spec: WorkerSpec) -> str:
        return f"{self._folder}/{spec.role}-{spec.rank}.{spec.incarnation}" if self._folder else ""

    async def end(self, spec: WorkerSpec) -> list[Process]:
        """End the remaining processes of a member's group and remove the group; return these processes."""
        folder = self.folder_of(spec)
        if not folder:
            return []
        left = [ownership.read_process(pid) for pid in control_groups.members_of(folder)]
        if not await asyncio.to_thread(control_groups.end, folder):
            logger.error("the control group of %s could not be emptied: %s", spec.name, folder)
        return [process for process in left if process is not None and process.running]

    async def close(self) -> bool:
        """End the remaining processes of the node and remove its group; False if it is still there."""
        return not self._folder or await asyncio.to_thread(control_groups.end, self._folder)


class Cleanup:
    """Cleanup on one node.

    Attributes:
        found: the leftovers so far, each with whether it is gone.
        groups: the members' control groups.
    """

    def __init__(self, config: AgentConfig, table: ProcessTable) -> None:
        self._config, self._table = config, table
        self.groups = MemberGroups(config.job_id, config.node_rank)
        self.found: list[Leftover] = []

    async def remove_segments(self, pid: int, name: str) -> None:
        """Remove the shared memory of an ended process, so that nothing stays in /dev/shm while the job runs on."""
        job_id, node_rank = self._config.job_id, self._config.node_rank
        try:
            removed = await asyncio.to_thread(remove_segments_of_process, job_id, node_rank, pid)
        except OSError as error:
            logger.warning("shared memory that %s (pid %d) may have left was not looked for: %s", name, pid, error)
            return
        if removed:
            logger.info("%s (pid %d) left %d segments of shared memory; they are removed", name, pid, removed)

    async def end_orphans(self, left_by: str) -> None:
        """End all processes whose parents have ended; ``left_by``: the process that has just ended."""
        for process, owner in (await self._table.end_orphans(left_by)).items():
            await self.remove_segments(process.pid, str(process))
            self._note(process, owner)

    async def end_of(self, left_by: str, spec: WorkerSpec | None) -> None:
        """End the leftovers of a process: its descendants, with a short grace, then its control group."""
        await self.end_orphans(left_by)
        for process in await self.groups.end(spec) if spec is not None else ():
            self._note(process, left_by)

    def _note(self, process: Process, owner: str) -> None:
        found = ownership.read_process(process.pid)
        runs = found is not None and found == process and found.running
        self.found.append(Leftover("process", f"{process} left by {owner}", not runs))

    async def all(self) -> tuple[Leftover, ...]:
        """All leftovers of the node, when it ends."""
        if not await self.groups.close():
            self.found.append(Leftover("control_group", "of the node: a process in it does not end", False))
        return tuple(self.found)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
