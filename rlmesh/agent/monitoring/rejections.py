"""Connections that the sockets of a job's processes refused: each process reports them to the master, which sums up."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping

from rlmesh.runtime.runtime import Runtime

__all__ = ["RejectionReporter", "RejectionSums"]

EVERY_S = 1.0
AGAIN_TICKS = 30
"""Counts that do not change are reported again after this many ticks of ``EVERY_S``: there may be another master by
then."""


class RejectionReporter:
    """Reports how many connections this process has refused since its start, by reason.

    Args:
        runtime: the runtime whose sockets refuse.
        tell: takes the process number and the counts; called on the runtime's loop, and only if there are counts.
    """

    def __init__(self, runtime: Runtime, tell: Callable[[int, Mapping[str, int]], object]) -> None:
        self._runtime, self._tell = runtime, tell
        self._reported: dict[str, int] = {}
        self._since = 0

    def start(self) -> None:
        """Report until the runtime's loop ends. Can be called from any thread."""
        self._runtime.post(self._again)

    def flush(self) -> None:
        """Report counts that were not reported yet. Never waits and never fails."""
        counts = dict(self._runtime.strangers.counts)
        self._since += 1
        if counts and (counts != self._reported or self._since >= AGAIN_TICKS):
            self._reported, self._since = counts, 0
            self._tell(os.getpid(), counts)

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _tick(self) -> None:
        self._runtime.strangers.settle()
        self.flush()
        self._again()


class RejectionSums:
    """Sums of the counts of all processes of a job. No I/O."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], dict[str, int]] = {}

    def take(self, name: str, pid: int, counts: Mapping[str, int]) -> None:
        """Set the counts of one process since its start."""
        self._counts[name, pid] = dict(counts)

    def by_process(self) -> dict[str, Counter[str]]:
        """Counts by the name of a member, an agent or the master, then by reason; all incarnations together."""
        sums: dict[str, Counter[str]] = {}
        for (name, _), counts in self._counts.items():
            sums.setdefault(name, Counter()).update(counts)
        return sums

    def __str__(self) -> str:
        """A line for people; empty if no connection was refused."""
        sums = self.by_process()
        if not sums:
            return ""
        reasons: Counter[str] = sum(sums.values(), Counter())
        at = Counter({name: counts.total() for name, counts in sums.items()}).most_common()
        places = ", ".join(f"{name} {count}" for name, count in at[:4]) + (", …" if len(at) > 4 else "")
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return f"{reasons.total()} rejected ({told}), at {places}"
