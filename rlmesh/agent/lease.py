"""The agent's half of its lease: how long it may let members run without word from the master. Pure.

A grant counts from the moment at which it was asked for, by the agent's clock; the master counts from when it
answered, which is later, and waits for longer (``rlmesh.master.leases``). So members of a node that is cut off have
ended before the master places them elsewhere, however long messages were under way and whatever the clocks show:
only durations are compared. The clock must count the time in which the machine is suspended.
"""

from __future__ import annotations

import math
import time

__all__ = ["Lease", "renew_s", "suspend_aware_clock"]

RENEWALS = 5


def renew_s(lease_s: float) -> float:
    """How often a renewal is asked for: several times within a lease."""
    return lease_s / RENEWALS


def suspend_aware_clock() -> float:
    """Seconds since the machine started, those included in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One agent's lease. Before the first grant there is none, and no member either."""

    def __init__(self) -> None:
        self._ends_at = -math.inf

    def granted(self, asked_at: float, seconds: float) -> None:
        """A grant came for what was asked at ``asked_at``. An older one never shortens a newer one."""
        self._ends_at = max(self._ends_at, asked_at + seconds)

    def end(self) -> None:
        """The master took it back."""
        self._ends_at = -math.inf

    def left_s(self, now: float) -> float:
        """Seconds until its end; 0 or less when it is over."""
        return self._ends_at - now

    def held(self, now: float) -> bool:
        return self._ends_at > now
