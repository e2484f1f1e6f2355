"""What a node makes of a head that does not answer: when to look whether it is still there, and when to give it up.

A call to a process that has ended may fail at once, because its connection was closed, or by its deadline only, because
the next connection never came about. So the end of a call says little; what tells is the head's machine, which refuses
connections to the port of a process that is gone. Pure.
"""

from __future__ import annotations

__all__ = ["Silence"]


class Silence:
    """Since when nothing was heard. All times are seconds of one clock that only grows.

    Args:
        quiet_s: an answer that takes longer than this is late.
        look_s: between two looks at the head's port, while it is late or its connection was lost.
        lost_s: without a word for so long, the head is given up, whatever its machine says.
    """

    def __init__(self, now: float, *, quiet_s: float, look_s: float, lost_s: float) -> None:
        self._quiet_s, self._look_s, self._lost_s = quiet_s, look_s, lost_s
        self._heard_at, self._looked_at = now, float("-inf")
        self._failed = False

    def heard(self, now: float) -> None:
        """It answered."""
        self._heard_at, self._failed = now, False

    def failed(self) -> None:
        """A call to it failed, so that there is reason to look before the answer is late."""
        self._failed = True

    def lasts_s(self, now: float) -> float:
        return now - self._heard_at

    def look(self, now: float) -> bool:
        """Whether to look now if somebody listens at its port; counts as done."""
        is_due = (self._failed or self.lasts_s(now) > self._quiet_s) and now - self._looked_at >= self._look_s
        if is_due:
            self._looked_at = now
        return is_due

    def too_long(self, now: float) -> bool:
        return self.lasts_s(now) > self._lost_s
