"""Who was turned away at the sockets of a job's processes: each process tells the master, which adds it up."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping

from rlmesh.runtime.runtime import Runtime

__all__ = ["RejectionReporter", "RejectionSums"]

EVERY_S = 1.0
AGAIN_TICKS = 30
"""Counts that do not change are told again after so many seconds: there may be another master by then."""


class RejectionReporter:
    """Tells how many strangers one process has turned away since it began, by reason.

    Args:
        runtime: at whose sockets they came.
        tell: takes the number of the process and the counts; called on the runtime's loop, and only if there are some.
    """

    def __init__(self, runtime: Runtime, tell: Callable[[int, Mapping[str, int]], object]) -> None:
        self._runtime, self._tell = runtime, tell
        self._told: dict[str, int] = {}
        self._since = 0

    def start(self) -> None:
        """Go on until the runtime's loop ends. From any thread."""
        self._runtime.post(self._again)

    def flush(self) -> None:
        """Tell what was not told yet. Never waits and never fails."""
        counts = dict(self._runtime.strangers.counts)
        self._since += 1
        if counts and (counts != self._told or self._since >= AGAIN_TICKS):
            self._told, self._since = counts, 0
            self._tell(os.getpid(), counts)

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _tick(self) -> None:
        self._runtime.strangers.settle()
        self.flush()
        self._again()


class RejectionSums:
    """What all processes of a job have told. Pure."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], dict[str, int]] = {}

    def take(self, name: str, pid: int, counts: Mapping[str, int]) -> None:
        """Counts of one process since it began, in place of those that it told before."""
        self._counts[name, pid] = dict(counts)

    def by_process(self) -> dict[str, Counter[str]]:
        """By the name of a member, an agent or the master, and by reason; all of its incarnations together."""
        sums: dict[str, Counter[str]] = {}
        for (name, _), counts in self._counts.items():
            sums.setdefault(name, Counter()).update(counts)
        return sums

    def __str__(self) -> str:
        """For people; empty if nobody was turned away."""
        sums = self.by_process()
        if not sums:
            return ""
        reasons: Counter[str] = sum(sums.values(), Counter())
        at = Counter({name: counts.total() for name, counts in sums.items()}).most_common()
        places = ", ".join(f"{name} {count}" for name, count in at[:4]) + (", …" if len(at) > 4 else "")
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return f"{reasons.total()} rejected ({told}), at {places}"
