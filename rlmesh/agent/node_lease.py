"""The agent's side of the node lease: how long members may run without contact to the master. Pure.

A grant starts when the agent asks for it. The master starts its own count later, when it answers, and waits longer
(``rlmesh.master.decisions.silent_nodes``). Members of a node that is cut off have therefore ended before the master
places them elsewhere, however long messages take: only durations are compared, never times of two clocks. The clock
must include the time in which the machine is suspended.
"""

from __future__ import annotations

import math
import time

__all__ = ["Lease", "Standstills", "renew_s", "suspend_aware_clock"]

RENEWALS = 5
STILL_S = 1.0
"""An agent that did not look at its lease for so long stood still."""


def renew_s(lease_s: float) -> float:
    """How often a renewal is asked for: several times within a lease."""
    return lease_s / RENEWALS


def suspend_aware_clock() -> float:
    """Seconds since the machine started, those included in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Standstills:
    """Tells a lease that ran out because its holder stood still from one that was not renewed. To be looked at often.

    While an agent stood still its members did too, most often, and its master may have: then nobody has given anybody
    up. So the end of such a lease is a reason to ask, and to let nothing run meanwhile, but not yet to end anything.
    """

    def __init__(self, now: float) -> None:
        self._looked_at, self._woke_at = now, -math.inf

    def look(self, now: float) -> bool:
        """Whether the caller has just gone on after a standstill."""
        stood_still = now - self._looked_at > STILL_S
        self._looked_at = now
        if stood_still:
            self._woke_at = now
        return stood_still

    def lately(self, now: float, within_s: float) -> bool:
        """Whether a standstill ended so short a time ago."""
        return now - self._woke_at <= within_s


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
