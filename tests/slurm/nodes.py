"""The processes of a Slurm job on this machine, and a node that is lost with all of its own."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.master.launched import alive, command, descendants
from tests.own_time import HANG_S
from tests.slurm.cluster import SlurmCluster


def output(folder: Path, name: str = "out") -> str:
    path = folder / name
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(folder: Path, pattern: str, times: int = 1, timeout_s: float = 60.0, name: str = "out") -> list[str]:
    """The matches in the job's output, when there are so many."""
    deadline = time.monotonic() + timeout_s
    while len(found := re.findall(pattern, output(folder, name))) < times:
        assert time.monotonic() < deadline, f"{pattern} did not come {times} times:\n{output(folder, name)}"
        time.sleep(0.1)
    return [str(each) for each in found]


def until_gone(pids: list[int], timeout_s: float = HANG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.05)


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def is_of(pid: int, job: str, slurm: SlurmCluster) -> bool:
    its = environ(pid)
    return all(
        f"{name}={value}\0".encode() in its
        for name, value in (("SLURM_JOB_ID", job), ("SLURM_CONF", slurm.env["SLURM_CONF"]))
    )


def lose_node(cluster: SlurmCluster, job: str, number: int) -> None:
    """The node loses its power: its daemons, and what they started for the job, are gone without a word."""
    node = f"node{number}"
    lost = [pid for pid in all_pids() if _is_on(pid, node, job, cluster)]
    assert lost
    daemons = _step_daemons(node, job, cluster)
    cluster.kill_node(number)
    # At one stroke: srun has a second process that ends the step when the first one dies before it. All are stopped,
    # and then end children first, since the kernel wakes those that are stopped and lose their parent.
    for pid in [*daemons, *lost]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in [*sorted(lost, reverse=True), *daemons]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_on(pid: int, node: str, job: str, cluster: SlurmCluster) -> bool:
    return is_of(pid, job, cluster) and f"SLURMD_NODENAME={node}\0".encode() in environ(pid)


def _step_daemons(node: str, job: str, cluster: SlurmCluster) -> list[int]:
    """Each has a task of the job on that node below it. Another cluster on this machine may have a job of the same
    number, and nodes of the same names."""
    named = [pid for pid in all_pids() if command(pid).startswith(f"slurmstepd: [{job}.")]
    return [pid for pid in named if any(_is_on(child, node, job, cluster) for child in descendants(pid))]
