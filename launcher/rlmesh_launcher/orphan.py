"""Cleanup of a Slurm job that has lost its first node, and with it the batch shell, ``srun`` and the head.

With ``--no-kill`` Slurm keeps such a job until its time limit, although nothing works in it. So a task that has lost
its head checks whether ``srun`` is still there. If not, it waits until Slurm has given up the first node, and then
requeues or cancels the job.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Literal

from rlmesh.errors import UsageError
from rlmesh.runtime.transport.inet import probe
from rlmesh_launcher.hostlist import expand_nodes
from rlmesh_launcher.slurm import Task

__all__ = ["VARIABLE", "look_after", "verdict"]

VARIABLE = "RLMESH_FIRST_NODE_LOST"
"""Variable with the action: ``requeue`` or ``cancel``; set by the script of ``rlmesh launch --slurm``. Unset:
nothing."""
POLL_S = 10.0
WATCH_S = 3600.0
"""Seconds; longer than any ``SlurmdTimeout``."""
WATCHERS = 2
"""Number of tasks after the head that watch, since another node may be lost with the first; each polls slower."""
SRUN_S = 5.0
COMMAND_S = 60.0

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Verdict = Literal["over", "wait", "orphaned"]


def verdict(said: str) -> Verdict:
    """Judge the output of ``squeue -o '%T %B %N'``: the job does not run (over), Slurm has not given up its first node
    (wait), or it has (orphaned). Of a heterogeneous job the first component counts, which has the first node."""
    state, _, rest = (said.strip().splitlines() or [""])[0].partition(" ")
    host, _, nodes = rest.partition(" ")
    if state not in ("RUNNING", "COMPLETING"):
        return "over"
    try:
        return "wait" if state == "COMPLETING" or host in expand_nodes(nodes) else "orphaned"
    except UsageError:
        return "wait"


def look_after(
    task: Task, env: Mapping[str, str] = os.environ, *, run: Run = subprocess.run,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> None:  # fmt: skip
    """Check on the job of a task that has lost its head: return at once if the job can end by itself, else end it.

    Prints nothing, since the output of a task goes through ``srun``.
    """
    action = env.get(VARIABLE, "")
    if action not in ("requeue", "cancel") or not 0 < task.rank <= WATCHERS or _srun_is_there(env):
        return
    deadline = clock() + WATCH_S
    while clock() < deadline:
        found = _output_of(["squeue", "--noheader", "--sort=i", f"--jobs={task.id}", "--format=%T %B %N"], run)
        match verdict(found) if found is not None else "wait":
            case "over":
                return
            case "orphaned":
                _output_of(["scontrol", "requeue", task.id] if action == "requeue" else ["scancel", task.id], run)
        sleep(POLL_S * task.rank)


def _srun_is_there(env: Mapping[str, str]) -> bool:
    """True if the step's ``srun`` still takes connections, or Slurm does not say where it is."""
    host, port = env.get("SLURM_LAUNCH_NODE_IPADDR", ""), env.get("SLURM_SRUN_COMM_PORT", "")
    if not (host and port.isascii() and port.isdigit()):
        return True
    return any(each.code == 0 for each in probe(host, int(port), SRUN_S))


def _output_of(command: list[str], run: Run) -> str | None:
    """The command's output; None if it failed."""
    try:
        done = run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
