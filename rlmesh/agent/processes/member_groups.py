"""The control groups of one node's members, as its agent keeps them."""

from __future__ import annotations

import asyncio
import logging
import os

from rlmesh.agent.processes import control_groups, ownership
from rlmesh.agent.processes.ownership import Process
from rlmesh.agent.protocol import WorkerSpec

__all__ = ["MemberGroups"]

logger = logging.getLogger(__name__)


class MemberGroups:
    """Makes a group for each member and ends it. Nothing here fails: without groups members live as they did before.

    Args:
        own: this process's group, in which groups may be made; empty where they may not.
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
            # Fails where processes live in the group itself, unless it is the root: then there are no limits.
            for folder in (self._own, self._folder):
                _write(f"{folder}/cgroup.subtree_control", "+memory")
            self._limits = True
        except OSError as error:
            logger.info("members' memory is not limited by control groups: %s: %s", self._own, error.strerror)
        return ""

    def make(self, spec: WorkerSpec) -> str:
        """The folder of a member's group, which its process is to enter; empty if it has none."""
        if not self._folder:
            return ""
        folder = self.folder_of(spec)
        try:
            os.makedirs(folder, exist_ok=True)
            if self._limits and spec.memory_limit_bytes:
                _write(f"{folder}/memory.max", str(spec.memory_limit_bytes))
                _write(f"{folder}/memory.oom.group", "1")  # a member whose parts are killed singly hangs
        except OSError as error:
            logger.warning("%s has no control group: %s: %s", spec.name, folder, error.strerror)
            return ""
        return folder

    def folder_of(self, spec: WorkerSpec) -> str:
        return f"{self._folder}/{spec.role}-{spec.rank}.{spec.incarnation}" if self._folder else ""

    async def end(self, spec: WorkerSpec) -> list[Process]:
        """End what is left in a member's group, and remove it; returns what ran there."""
        folder = self.folder_of(spec)
        if not folder:
            return []
        left = [ownership.read_process(pid) for pid in control_groups.members_of(folder)]
        if not await asyncio.to_thread(control_groups.end, folder):
            logger.error("the control group of %s could not be emptied: %s", spec.name, folder)
        return [process for process in left if process is not None and process.running]

    async def close(self) -> bool:
        """End all that is left on the node, and remove its group; False if it is still there."""
        return not self._folder or await asyncio.to_thread(control_groups.end, self._folder)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
