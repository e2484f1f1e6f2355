"""Resource use of a node and its members for metrics, read from the operating system on request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NodeUse", "read_use"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Load over one minute, free bytes of memory and shared memory, and resident bytes of members by ``ROLE:rank``."""

    load: float
    memory_free_bytes: int
    shm_free_bytes: int
    members: Mapping[str, int]


def read_use(members: Mapping[str, int]) -> NodeUse:
    """Read the use now. ``members``: process numbers by name. Unreadable values are 0; gone processes are left out."""
    resident = {name: size for name, pid in members.items() if (size := _resident_bytes(pid))}
    return NodeUse(os.getloadavg()[0], _available_bytes(), _free_bytes("/dev/shm"), resident)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return 0


def _free_bytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
