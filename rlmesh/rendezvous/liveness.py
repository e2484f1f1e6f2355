"""Liveness of the rendezvous server: when to check whether it still runs, and when to give it up. No I/O.

A call to an ended process may fail at once, because its connection was closed, or only by its deadline, because the
next connection was never established. So a failed call proves little; the proof is that the server's machine refuses
connections to the port.
"""

from __future__ import annotations

__all__ = ["ServerLiveness"]


class ServerLiveness:
    """Time since the last answer. All times are seconds of one monotonic clock.

    Args:
        quiet_s: an answer that takes longer than this is late.
        check_s: between two checks of the server's port, while an answer is late or a connection was lost.
        lost_s: silence after which the server is given up, whatever its machine answers.
    """

    def __init__(self, now: float, *, quiet_s: float, check_s: float, lost_s: float) -> None:
        self._quiet_s, self._check_s, self._lost_s = quiet_s, check_s, lost_s
        self._answered_at, self._checked_at = now, float("-inf")
        self._failed = False

    def answered(self, now: float) -> None:
        """Record an answer of the server."""
        self._answered_at, self._failed = now, False

    def failed(self) -> None:
        """Record a failed call, so that a check is due before the answer is late."""
        self._failed = True

    def silent_s(self, now: float) -> float:
        return now - self._answered_at

    def check_due(self, now: float) -> bool:
        """True if the server's port is to be checked now; this counts as the check."""
        is_due = (self._failed or self.silent_s(now) > self._quiet_s) and now - self._checked_at >= self._check_s
        if is_due:
            self._checked_at = now
        return is_due

    def is_lost(self, now: float) -> bool:
        return self.silent_s(now) > self._lost_s
