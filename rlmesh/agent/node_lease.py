"""The agent's side of the node lease: how long members may run without contact to the master. No I/O.

A grant counts from the moment at which the agent asks for it. The master starts its own count later, when it answers,
and waits longer (``rlmesh.master.decisions.silent_nodes``). Members of a node that is cut off have therefore ended
before the
master places them elsewhere, however long messages take: only durations are compared, never times of two clocks. The
clock must include the time in which the machine is suspended.
"""

from __future__ import annotations

import math
import time

__all__ = ["Lease", "Standstills", "renew_s", "suspend_aware_clock"]

RENEWALS = 5
STILL_S = 1.0
"""An agent that did not check its lease for this long stood still."""


def renew_s(lease_s: float) -> float:
    """Seconds between renewals: several within a lease."""
    return lease_s / RENEWALS


def suspend_aware_clock() -> float:
    """Seconds since the machine started, including the time in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Standstills:
    """Detects standstills: times in which this process did not run, since it was suspended or got no core.

    Call `look` often.

    If the agent stood still, its members usually did too, and perhaps the master, which then has not given the node up.
    So a lease that ended in a standstill differs from one that was not renewed: the agent stops the members and asks
    the master, and does not end them yet.
    """

    def __init__(self, now: float) -> None:
        self._looked_at, self._woke_at = now, -math.inf

    def look(self, now: float) -> bool:
        """True if the caller has just resumed after a standstill."""
        stood_still = now - self._looked_at > STILL_S
        self._looked_at = now
        if stood_still:
            self._woke_at = now
        return stood_still

    def lately(self, now: float, within_s: float) -> bool:
        """True if a standstill ended within the last ``within_s`` seconds."""
        return now - self._woke_at <= within_s


class Lease:
    """One agent's lease. It is not held before the first grant, when there are no members either."""

    def __init__(self) -> None:
        self._ends_at = -math.inf

    def granted(self, asked_at: float, seconds: float) -> None:
        """Extend the lease by a grant that was requested at ``asked_at``. An older grant never shortens a newer one."""
        self._ends_at = max(self._ends_at, asked_at + seconds)

    def end(self) -> None:
        """End the lease: the master revoked it."""
        self._ends_at = -math.inf

    def left_s(self, now: float) -> float:
        """Seconds until the end; 0 or less after it."""
        return self._ends_at - now

    def held(self, now: float) -> bool:
        return self._ends_at > now
