"""The memory that a pool may still take before the file system, the machine or the memory limit is full.

Pages of /dev/shm are memory: they count against the file system's size (64 MiB in a container by default), the
machine's memory and the control group's limit. A process that exceeds the first gets a bus error at the first touch of
a page that was not reserved; a process that exceeds the others is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_KEPT_FREE = 16
"""The inverse of the share that is left to others: NCCL and torch use /dev/shm too."""


@dataclass(frozen=True)
class MemoryBudget:
    """The ``bytes`` that may be taken; ``limited_by`` says in words what the limit is and how to raise it."""

    bytes: int
    limited_by: str


def room_in(directory: str, root: Path = Path("/")) -> MemoryBudget:
    """The memory left for files in a directory. ``root`` is the folder that holds proc and sys."""
    system = os.statvfs(directory)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    rooms = [
        MemoryBudget(
            free - size // _KEPT_FREE,
            f"{directory} has {free >> 20} of {size >> 20} MiB free (it is enlarged by `mount -o remount,size=…`, "
            "`docker run --shm-size=…`, or a volume of medium Memory)",
        )
    ]
    memory = _machine_memory(root)
    if memory is not None:
        total, available = memory
        rooms.append(
            MemoryBudget(available - total // _KEPT_FREE, f"the machine has {available >> 20} MiB of memory available")
        )
    rooms.extend(
        MemoryBudget(
            limit - used - limit // _KEPT_FREE, f"the memory limit of {limit >> 20} MiB has {used >> 20} MiB in use"
        )
        for limit, used in _group_limits(root)
    )
    least = min(rooms, key=lambda room: room.bytes)
    return MemoryBudget(max(0, least.bytes), least.limited_by)


def _machine_memory(root: Path) -> tuple[int, int] | None:
    """Total and available bytes of the machine."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" not in values or "MemAvailable" not in values:
        return None
    return values["MemTotal"], values["MemAvailable"]


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits and uses of this process's control groups, without pages that the kernel drops on demand."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may name a group that only the host can see; the limit is then at the top.
        folder = base / path.strip("/")
        yield from _limits_upwards(folder if folder.is_dir() else base, base, *names)


def _limits_upwards(folder: Path, base: Path, limit: str, use: str, droppable: str) -> Iterator[tuple[int, int]]:
    while True:
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / use).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            pass
        else:
            if most.isdigit() and int(most) < 1 << 60:
                yield int(most), used - int(statistics.get(droppable, "0"))
        if folder == base:
            return
        folder = folder.parent
