"""Calls that may be made again: when they may, and how they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rlmesh.errors import CallError, PeerLost, Restarting, StaleIncarnation
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0


def pause_before_retry(error: BaseException | None, attempt: int, left_s: float, *, gone: bool) -> float | None:
    """Seconds to wait before an idempotent call is made again; None if it may not be. Pure.

    Args:
        error: what it failed with. What the method raised is an answer, and no reason to try again.
        attempt: how often it was made, 1 or more.
        left_s: until its deadline.
        gone: the member's process has ended, and no other has taken its place.
    """
    if not isinstance(error, PeerLost | StaleIncarnation | Restarting) or error.executed == "yes" or gone:
        return None
    pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1))
    return pause_s if attempt < MAX_ATTEMPTS and pause_s < left_s else None


class RetriedOrigin:
    """What all origins have in common that stand for several attempts."""

    def woke(self, lag_ns: int, run_queue_ns: int) -> None:
        pass  # The attempts measure their own time.

    def stay(self) -> None:
        pass  # A call that may be made again answers its caller.

    def want(self, *, blocks: bool = False) -> None:
        pass

    def settled(self) -> bool:
        return False

    def members(self) -> None:
        return None


class Retries(RetriedOrigin):
    """One idempotent call, made as often as it may be; the origin of the future that its caller holds.

    Args:
        launch: makes the call once, with so many seconds until its deadline.
        later: runs a function on the runtime's loop after a pause.
        reach: whether the member is gone; if not, a lost connection to it is forgotten.
    """

    def __init__(
        self, launch: Callable[[float], Future[Any]], later: Callable[[float, Callable[[], None]], None],
        reach: Callable[[], bool], timeout_s: float,
    ) -> None:  # fmt: skip
        self._launch, self._later, self._gone = launch, later, reach
        self._deadline = clock.now() + timeout_s
        self._attempt = 0
        self._current: Future[Any] | None = None
        self._cancelled = False
        self.future: Future[Any] = Future(self)

    def start(self) -> Future[Any]:
        """Make the call for the first time, or again."""
        future = self.future
        if not self._cancelled:
            self._attempt += 1
            self._current = self._launch(max(0.0, self._deadline - clock.now()))
            self._current.add_done_callback(self._ended)
            if self._cancelled:
                self._current.cancel()
        return future

    def _start_again(self) -> None:
        self.start()

    def _ended(self, attempt: Future[Any]) -> None:
        error = attempt.exception()
        if error is None:
            self.future.end(attempt.result(), None)
            return
        may_retry = isinstance(error, CallError) and not self._cancelled
        pause_s = None
        if may_retry:
            left_s = self._deadline - clock.now()
            pause_s = pause_before_retry(error, self._attempt, left_s, gone=self._gone())
        if pause_s is None:
            self.future.end(None, error)
            return
        logger.info("attempt %d failed and is made again in %.2f s: %s", self._attempt, pause_s, error)
        self._later(pause_s, self._start_again)

    # As an origin.

    def describe(self) -> str:
        return self._text(self._current._described() if self._current is not None else "")

    def explain(self) -> str:
        return self._text(self._current.waiting_for() if self._current is not None else "")

    def _text(self, text: str) -> str:
        return f"{text} (attempt {self._attempt})" if self._attempt > 1 else text

    def cancel(self) -> None:
        self._cancelled = True
        if self._current is not None:
            self._current.cancel()
