"""A member's part in a stop at which all ranks stop at the same step.

The master first asks every member for its step, and from then on the member waits at its next boundary. When all have
answered, the master sets the step, later than any reported one, and the waiting members go on to it. So no rank can
have passed the step when it learns of it, however fast it is.
"""

from __future__ import annotations

import logging
import threading

from rlmesh.job.context import StopRequest
from rlmesh.runtime.process import clock

__all__ = ["Stopping"]

logger = logging.getLogger(__name__)

HOLD_S = 20.0
"""Seconds for which a boundary waits for the common step: the master asks all members in less time."""


class Stopping:
    """The stop requested of one member. For any thread; the member's own code calls ``boundary``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._request: StopRequest | None = None
        self._held = False
        self._step: int | None = None

    def ask(self, request: StopRequest) -> None:
        """Set the request and release waiting boundaries. Later requests are ignored, with one exception: a stop at the
        next boundary (``step`` is None) replaces a stop at a given step."""
        with self._changed:
            self._held = False
            if self._request is None or (request.step is None and self._request.step is not None):
                self._request = request
            self._changed.notify_all()

    def hold(self) -> int | None:
        """Return the step of the last boundary (None before any); the next one waits until ``ask`` or ``release``."""
        with self._changed:
            self._held = self._request is None
            return self._step

    def release(self) -> None:
        """Release waiting boundaries: there will be no stop after all."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def boundary(self, step: int) -> StopRequest | None:
        """Note the end of a step and return the request, if any. Waits at most ``HOLD_S`` for an announced one."""
        with self._changed:
            self._step = step
            if not clock.wait_for(self._changed, lambda: not self._held, HOLD_S):
                logger.error("the master did not say within %g s at which step to stop; step %d goes on", HOLD_S, step)
                self._held = False
            return self._request
