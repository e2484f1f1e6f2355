"""How one member takes part in a stop at which all ranks stop at the same step.

The master first asks every member for its step, and from then on the member waits at its next boundary; when all have
answered, the master sets the step, later than any that was told, and those that wait go on to it. So no rank can have
passed the step by the time that it learns of it, however fast it is.
"""

from __future__ import annotations

import logging
import threading

from rlmesh.job.context import StopRequest
from rlmesh.runtime.process import clock

__all__ = ["Stopping"]

logger = logging.getLogger(__name__)

HOLD_S = 20.0
"""How long a boundary waits for the step at which all stop: the master asks all members within less."""


class Stopping:
    """The stop that a member was asked for. For any thread; ``boundary`` is called by the member's own code."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._request: StopRequest | None = None
        self._held = False
        self._step: int | None = None

    def ask(self, request: StopRequest) -> None:
        """Hand out this request. Of several the first one stays, but a stop at the next boundary, wherever the others
        are, is more urgent than one at a step. Boundaries wait no longer."""
        with self._changed:
            self._held = False
            if self._request is None or (request.step is None and self._request.step is not None):
                self._request = request
            self._changed.notify_all()

    def hold(self) -> int | None:
        """The step of the last boundary, None before any; the next one waits until ``ask`` or ``let_go``."""
        with self._changed:
            self._held = self._request is None
            return self._step

    def let_go(self) -> None:
        """There will be no stop after all."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def boundary(self, step: int) -> StopRequest | None:
        """A step has ended; the request if there is one. Waits at most ``HOLD_S`` for it, where it was announced."""
        with self._changed:
            self._step = step
            if not clock.wait_for(self._changed, lambda: not self._held, HOLD_S):
                logger.error("the master did not say within %g s at which step to stop; step %d goes on", HOLD_S, step)
                self._held = False
            return self._request
