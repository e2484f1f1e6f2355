"""Idempotent calls, which are made again: single ones (`Retries`), and calls to several ranks (`GroupRetries`)."""

from __future__ import annotations

import logging
from _thread import allocate_lock
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rlmesh.errors import CallError, PeerLost, Restarting, StaleIncarnation
from rlmesh.runtime.calling.pending import Cohort
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0

Later = Callable[[float, Callable[[], None]], None]
"""Runs a function on the runtime's loop after a pause in seconds."""


def pause_before_retry(error: BaseException | None, attempt: int, left_s: float, *, gone: bool) -> float | None:
    """Seconds to wait before an idempotent call is made again; None if the error is final. No I/O.

    Args:
        error: the error of the attempt. An exception that the method raised is an answer, and no reason to try again.
        attempt: the number of attempts so far, 1 or more.
        left_s: seconds until the call's deadline.
        gone: the member's process has ended, and no other has taken its place.
    """
    if not isinstance(error, PeerLost | StaleIncarnation | Restarting) or error.executed == "yes" or gone:
        return None
    pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1))
    return pause_s if attempt < MAX_ATTEMPTS and pause_s < left_s else None


class RetriedOrigin:
    """The common part of all origins of futures that stand for several attempts."""

    def waiter_woke(self, lag_ns: int, run_queue_ns: int) -> None:
        pass  # The attempts measure their own time.

    def leave_at_producer(self) -> None:
        pass  # The result of a call that may be made again always comes to its caller.

    def value_needed(self, *, blocks: bool = False) -> None:
        pass

    def settled(self) -> bool:
        return False

    def members(self) -> None:
        return None


class Retries(RetriedOrigin):
    """One idempotent call to one member; the origin of the future that its caller holds.

    Args:
        launch: makes the call once; its argument is the number of seconds until the deadline.
        later: runs a function after a pause.
        is_gone: True if the member is gone; if not, a lost connection to the member is forgotten.
        timeout_s: seconds until the deadline of all attempts together.
    """

    def __init__(
        self, launch: Callable[[float], Future[Any]], later: Later, is_gone: Callable[[], bool], timeout_s: float
    ) -> None:
        self._launch, self._later, self._is_gone = launch, later, is_gone
        self._deadline = clock.now() + timeout_s
        self._attempt = 0
        self._current: Future[Any] | None = None
        self._cancelled = False
        self.future: Future[Any] = Future(self)

    def start(self) -> None:
        """Make the call for the first time, or again."""
        if not self._cancelled:
            self._attempt += 1
            self._current = self._launch(max(0.0, self._deadline - clock.now()))
            self._current.add_done_callback(self._ended)
            if self._cancelled:
                self._current.cancel()

    def _ended(self, attempt: Future[Any]) -> None:
        error = attempt.exception()
        if error is None:
            self.future.end(attempt.result(), None)
            return
        pause_s = None
        if isinstance(error, CallError) and not self._cancelled:
            left_s = self._deadline - clock.now()
            pause_s = pause_before_retry(error, self._attempt, left_s, gone=self._is_gone())
        if pause_s is None:
            self.future.end(None, error)
            return
        logger.info("attempt %d failed and is made again in %.2f s: %s", self._attempt, pause_s, error)
        self._later(pause_s, self.start)

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


class Launch(Protocol):
    """Makes a call to several ranks once."""

    def __call__(self, left_s: float, newer_than: int = -1) -> Cohort: ...


class GroupRetries:
    """One idempotent call to several ranks of an elastic role.

    Ranks of a group depend on each other: a rank that has begun an attempt may wait for the others for ever. So an
    attempt that was sent is repeated only by a newer generation of the group, in which nothing of the attempt is left,
    and by all ranks, also those that had answered. Results are given to the futures once the attempt has all of them.

    Args:
        launch: makes the call, given the number of seconds until its deadline, and a generation: only a newer one gets
            the call.
        later: runs a function after a pause.
        is_gone: True if a rank is gone and no other process has taken its place.
        generation: gives the newest known generation.
        timeout_s: seconds until the deadline of all attempts together.
        size: the number of ranks that are called.
    """

    def __init__(
        self, launch: Launch, later: Later, is_gone: Callable[[], bool], generation: Callable[[], int],
        timeout_s: float, size: int,
    ) -> None:  # fmt: skip
        self._launch, self._later, self._is_gone, self._generation = launch, later, is_gone, generation
        self._deadline = clock.now() + timeout_s
        self._lock = allocate_lock()
        self._attempt = 0
        self.current: Cohort | None = None
        self._left = 0
        self._over = False
        """No further attempt is made: the results of the current one are final."""
        self.futures: list[Future[Any]] = [Future(RetriedPart(self, index)) for index in range(size)]

    def start(self, newer_than: int = -1) -> None:
        """Make the call for the first time, or again."""
        self._attempt += 1
        cohort = self._launch(max(0.0, self._deadline - clock.now()), newer_than)
        with self._lock:
            self.current, self._left = cohort, len(cohort.parts)
        for part in cohort.parts:
            assert part.future is not None
            part.future.add_done_callback(partial(self._ended, cohort))
        if self._over:
            self._cancel_parts(cohort)

    def _ended(self, cohort: Cohort, answer: Future[Any]) -> None:
        with self._lock:
            if cohort is not self.current:
                return  # Another part had failed before, and the attempt is made again.
            self._left -= 1
            last = self._left == 0
        error = answer.exception()
        if not self._over and error is not None and (pause_s := self._pause(error)) is not None:
            with self._lock:
                if cohort is not self.current:
                    return
                self.current = None
            logger.info("attempt %d failed and is made again in %.2f s: %s", self._attempt, pause_s, error)
            self._cancel_parts(cohort)
            self._later(pause_s, partial(self._start_again, cohort, error))
        elif self._over or error is not None or last:
            self._over = True
            self._pass_on(cohort)

    def _pause(self, error: BaseException) -> float | None:
        if not isinstance(error, CallError):
            return None
        left_s = self._deadline - clock.now()
        return pause_before_retry(error, self._attempt, left_s, gone=self._is_gone())

    def _start_again(self, cohort: Cohort, error: BaseException) -> None:
        """On the runtime's loop."""
        if self._over:
            return
        if not cohort.sent:
            self.start()
        elif self._generation() > cohort.generation:
            self.start(cohort.generation)
        else:  # No restart has been reported yet.
            self._attempt += 1
            pause_s = self._pause(error)
            if pause_s is not None:
                self._later(pause_s, partial(self._start_again, cohort, error))
                return
            self._over = True
            for future in self.futures:
                future.end(None, error)

    def _pass_on(self, cohort: Cohort) -> None:
        for future, part in zip(self.futures, cohort.parts, strict=True):
            answer = part.future
            if answer is not None and answer.done():
                error = answer.exception()
                future.end(answer.result() if error is None else None, error)

    @staticmethod
    def _cancel_parts(cohort: Cohort) -> None:
        for part in cohort.parts:
            if part.future is not None:
                part.future.cancel()

    def cancel(self) -> None:
        """End the call: the caller cancelled one of its futures."""
        self._over = True
        with self._lock:
            cohort = self.current
        if cohort is not None:
            self._cancel_parts(cohort)

    def text(self, index: int, *, explained: bool) -> str:
        """The call that a part waits for, for messages."""
        cohort = self.current
        if cohort is None:
            return f"the next attempt, after attempt {self._attempt} failed"
        part = cohort.parts[index]
        text = part.explain() if explained else part.describe()
        return f"{text} (attempt {self._attempt})" if self._attempt > 1 else text


class RetriedPart(RetriedOrigin):
    """The origin of the future of one rank."""

    def __init__(self, retries: GroupRetries, index: int) -> None:
        self._retries, self._index = retries, index

    def attempt(self) -> list[Future[Any]]:
        """The futures that the rank's future waits for: all parts of the current attempt."""
        cohort = self._retries.current
        return [part.future for part in cohort.parts if part.future is not None] if cohort is not None else []

    def describe(self) -> str:
        return self._retries.text(self._index, explained=False)

    def explain(self) -> str:
        return self._retries.text(self._index, explained=True)

    def cancel(self) -> None:
        self._retries.cancel()
