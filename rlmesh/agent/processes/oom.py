"""Detection of out-of-memory kills, from counters of the control groups and of the kernel."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from rlmesh.placement.machine.system import control_groups

__all__ = ["OomCounters", "at_the_limit"]


NEARLY_BYTES = 32 << 20
"""With less address space left, a process fails in places that do not mention memory."""


def at_the_limit(status: Path = Path("/proc/self/statm")) -> str:
    """Describe how near this process is to its limit of address space; empty if it is not near, or has none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        used = int(status.read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return ""
    if limit == resource.RLIM_INFINITY or limit - used > NEARLY_BYTES:
        return ""
    return f"this process uses {_mib(used)} of address space, and RLIMIT_AS allows {_mib(limit)}: ulimit -v"


class OomCounters:
    """Reads the counters of this process's control groups and of the machine; tests give other folders."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._last = self._read()

    def look(self, peak_rss_bytes: int, own_group: str = "") -> str:
        """Describe how the kernel ran out of memory since the last call; empty if it did not.

        Args:
            peak_rss_bytes: peak of the process that was killed.
            own_group: folder of the process's own control group, if it had one.
        """
        before, self._last = self._last, self._read()
        if own_group and _count(Path(own_group) / "memory.events") and (limit := _limit(Path(own_group))) is not None:
            return f"out of memory: its peak was {_mib(peak_rss_bytes)}, and it had asked for {_mib(limit)}"
        grown = [name for name, count in self._last.items() if count > before.get(name, 0)]
        if not grown:
            return ""
        peak = f"its peak was {_mib(peak_rss_bytes)}"
        for folder in control_groups(self._proc, self._cgroups, "memory"):
            if str(folder) in grown and (limit := _limit(folder)) is not None:
                return f"out of memory: {peak}, and its control group {folder} has a limit of {_mib(limit)}"
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(self._proc / "meminfo"))
        has = f", and the machine has {_mib(int(total[1]) * 1024)}" if total else ""
        return f"out of memory: {peak}{has}"

    def _read(self) -> dict[str, int]:
        found = {"kernel": _count(self._proc / "vmstat")}
        for folder in control_groups(self._proc, self._cgroups, "memory"):
            found[str(folder)] = max(_count(folder / "memory.events"), _count(folder / "memory.oom_control"))
        return found


def _count(path: Path) -> int:
    match = re.search(r"^oom_kill (\d+)$", _text(path), re.M)
    return int(match[1]) if match else 0


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _text(folder / name).strip()
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes a huge number for no limit
            return int(text)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
