"""What a member's process does, for a diagnosis: its Python stacks, and what the kernel says about it."""

from __future__ import annotations

import os
from pathlib import Path

from rlmesh.agent.protocol import WorkerSpec
from rlmesh.agent.worker.stacks import dump_stacks, stacks_file
from rlmesh.job.status import MemberStack

__all__ = ["examine"]

WAIT_S = 1.0
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel",
    "T": "is stopped",
    "t": "is traced",
    "Z": "has ended",
}


async def examine(spec: WorkerSpec, pid: int, socket_dir: str, silent: bool) -> MemberStack:
    """Of a member of this node. ``silent``: it was asked for its stacks and did not answer, so that a signal has to
    bring them; else there are none in what is returned."""
    text = await dump_stacks(pid, stacks_file(socket_dir, spec.role, spec.rank), WAIT_S) if silent else ""
    state, cpu_s = _state(pid)
    wchan = _read(f"/proc/{pid}/wchan").strip("0\n")
    return MemberStack(spec.role, spec.rank, spec.incarnation, pid, state, wchan, cpu_s, text)


def _state(pid: int) -> tuple[str, float]:
    """What the process does, and the processor time that it has used in all, in seconds."""
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
