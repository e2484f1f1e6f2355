"""Finds processes of the job itself that were stopped by a signal and are not let go on. Standard library only.

A process that died is known at once, one that was stopped looks alive. A member that is stopped is the business of its
callers' deadlines and of the master; but nobody waits for a stopped master, zygote or agent with a deadline of minutes.
Looks are counted, not seconds: while the looker stood still itself, as all processes do that a batch system suspends,
it did not look.
"""

from __future__ import annotations

from collections.abc import Iterable

LOOK_S = 1.0
LOOKS = 10
"""A process that was found stopped so many times in a row is as good as dead."""


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and not by a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def half_started(pid: int) -> list[int]:
    """Children of a process that have not become another program yet: their parent may wait for them to do so, with no
    way to be interrupted."""
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
    """Counts how often each process was found stopped in a row."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def look(self, pids: Iterable[int]) -> list[int]:
        """To be called every ``LOOK_S``; the processes that were stopped for too long."""
        self._counts = {pid: self._counts.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        return [pid for pid, count in self._counts.items() if count >= LOOKS]
