"""Detection of the job's own processes that were stopped by a signal and not resumed. Standard library only.

A death is known at once, but a stopped process looks alive. A stopped member is noticed by its callers' deadlines and
by the master; a stopped master, zygote or agent would delay others for minutes. Checks are counted instead of seconds:
if a batch system suspends the whole job, the checker is suspended too, and that time must not count.
"""

from __future__ import annotations

from collections.abc import Iterable

LOOK_S = 1.0
LOOKS = 10
"""A process that was found stopped this many times in a row is treated as dead."""


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal, and not by a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def half_started(pid: int) -> list[int]:
    """Children of a process that have not called exec yet: their parent may wait for that and cannot be interrupted."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            name = file.read()
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(each) for each in file.read().split()]
    except OSError:
        return []
    return [child for child in children if _name(child) == name]


def _name(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read()
    except OSError:
        return b""


class StoppedLooks:
    """Counts how often in a row each process was found stopped."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def look(self, pids: Iterable[int]) -> list[int]:
        """Check the processes; return those that were stopped for too long. Call every ``LOOK_S`` seconds."""
        self._counts = {pid: self._counts.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        return [pid for pid, count in self._counts.items() if count >= LOOKS]
