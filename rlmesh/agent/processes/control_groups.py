"""A control group (v2) for each member, where this process may make groups. Standard library only.

::

  <the agent's own group>/rlmesh-<job_id>-n<node>/ACTOR-0.1

Processes that a member starts are born into its group and cannot leave it by a new session or another parent, so one
write to ``cgroup.kill`` ends all of them at once, however fast they fork. Where groups may not be made, processes are
found as descendants.

The kernel's rules: Documentation/admin-guide/cgroup-v2.rst, "Delegation" and "No Internal Process Constraint".
:mod:`rlmesh.agent.processes.guardian` loads this file by its path: it may import nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Mount points of the v2 hierarchy: alone, or beside the v1 hierarchies."""
OFF = "RLMESH_CGROUPS"
"""Environment variable; 0 turns control groups off."""
PREFIX = "rlmesh-"
_POLL_S = 0.001


def own_group(proc: str = "/proc", roots: tuple[str, ...] = ROOTS) -> tuple[str, str]:
    """The folder of this process's group if groups may be made in it, else empty; and the reason why not."""
    if os.environ.get(OFF) == "0":
        return "", f"{OFF}=0"
    try:
        with open(f"{proc}/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError as error:
        return "", f"{error}"
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return "", "there is no control group v2"
    for root in roots:
        folder = os.path.join(root, path.lstrip("/")).rstrip("/")
        if not os.path.exists(f"{folder}/cgroup.subtree_control"):
            continue
        if not os.access(folder, os.W_OK | os.X_OK) or not os.access(f"{folder}/cgroup.procs", os.W_OK):
            return "", f"{folder} is not delegated to this user"
        return folder, ""
    return "", "the control groups v2 are not mounted"


def node_group(own: str, job_id: str, node_rank: int) -> str:
    """The folder of a node's control groups."""
    return f"{own}/{PREFIX}{job_id}-n{node_rank}"


def enter(folder: str) -> str:
    """Move the calling process into a group; return an empty text, or the error."""
    try:
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write("0")
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def members_of(folder: str) -> list[int]:
    """Numbers of the processes in a group and in the groups below it."""
    found: list[int] = []
    for path, _, _ in os.walk(folder):
        try:
            with open(f"{path}/cgroup.procs") as file:
                found += [int(line) for line in file]
        except (OSError, ValueError):
            pass
    return found


def end(folder: str, wait_s: float = 2.0) -> bool:
    """Kill the processes of a group, wait until it is empty, and remove it; False if it could not be removed. A missing
    group is no error."""
    if not os.path.isdir(folder):
        return True
    try:
        with open(f"{folder}/cgroup.kill", "w") as file:
            file.write("1")
    except OSError:
        pass  # the file is new in Linux 5.14; an empty group can be removed without it
    deadline = time.monotonic() + wait_s
    while True:
        if _remove(folder):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)


def sweep(own: str, lives: Callable[[str], bool]) -> None:
    """Remove groups without processes. A job leaves them if its agent and guardian were killed at the same moment.

    Args:
        lives: returns whether a node has any process, given ``<job_id>/<node>``. Such a process may be about to enter a
            group.
    """
    try:
        with os.scandir(own) as entries:
            for entry in entries:
                job_id, _, node = entry.name.removeprefix(PREFIX).rpartition("-n")
                ours = entry.name.startswith(PREFIX) and bool(job_id) and not members_of(entry.path)
                if ours and not lives(f"{job_id}/{node}"):
                    _remove(entry.path)
    except OSError:
        pass  # another process sweeps too


def _remove(folder: str) -> bool:
    try:
        for path, _, _ in os.walk(folder, topdown=False):
            os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False  # busy: a killed process has not ended yet
    return not os.path.isdir(folder)
