"""Idempotent calls to several ranks of an elastic role, which are made again as a whole."""

from __future__ import annotations

import logging
from _thread import allocate_lock
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rlmesh.errors import CallError
from rlmesh.runtime.calling.generations import Cohort
from rlmesh.runtime.calling.retry import RetriedOrigin, pause_before_retry
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock

logger = logging.getLogger(__name__)


class Launch(Protocol):
    """Makes the call once."""

    def __call__(self, left_s: float, newer_than: int = -1) -> Cohort: ...


class GroupRetries:
    """One idempotent call to several ranks, made as often as it may be.

    Ranks of a group count on each other: one that has begun an attempt may wait for the others for ever. So an attempt
    that was sent is made again only by a newer generation of the group, in which nothing of it is left, and all ranks
    make it again, also those that had answered. Results are told once the attempt has them all.

    Args:
        launch: makes the call with so many seconds until its deadline, in a generation newer than the one given.
        later: runs a function on the runtime's loop after a pause.
        reach: whether a rank is gone and no other has taken its place.
        generation: the newest generation that is known.
        timeout_s: until the deadline of all attempts together.
        size: how many ranks are called.
    """

    def __init__(
        self, launch: Launch, later: Callable[[float, Callable[[], None]], None], reach: Callable[[], bool],
        generation: Callable[[], int], timeout_s: float, size: int,
    ) -> None:  # fmt: skip
        self._launch, self._later, self._gone, self._generation = launch, later, reach, generation
        self._deadline = clock.now() + timeout_s
        self._lock = allocate_lock()
        self._attempt = 0
        self.current: Cohort | None = None
        self._left = 0
        self._over = False
        """No further attempt is made: what the parts of this one answer is passed on."""
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
            self._tell(cohort)

    def _pause(self, error: BaseException) -> float | None:
        if not isinstance(error, CallError):
            return None
        left_s = self._deadline - clock.now()
        return pause_before_retry(error, self._attempt, left_s, gone=self._gone())

    def _start_again(self, cohort: Cohort, error: BaseException) -> None:
        """On the runtime's loop."""
        if self._over:
            return
        if not cohort.sent:
            self.start()
        elif self._generation() > cohort.generation:
            self.start(cohort.generation)
        else:  # Nothing has been heard of a restart yet.
            self._attempt += 1
            pause_s = self._pause(error)
            if pause_s is not None:
                self._later(pause_s, partial(self._start_again, cohort, error))
                return
            self._over = True
            for future in self.futures:
                future.end(None, error)

    def _tell(self, cohort: Cohort) -> None:
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

    # For the futures.

    def cancel(self) -> None:
        self._over = True
        with self._lock:
            cohort = self.current
        if cohort is not None:
            self._cancel_parts(cohort)

    def text(self, index: int, *, explained: bool) -> str:
        """Whom the part waits for."""
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
        """What the rank's future waits for: an attempt's results are told once it has them all."""
        cohort = self._retries.current
        return [part.future for part in cohort.parts if part.future is not None] if cohort is not None else []

    def describe(self) -> str:
        return self._retries.text(self._index, explained=False)

    def explain(self) -> str:
        return self._retries.text(self._index, explained=True)

    def cancel(self) -> None:
        self._retries.cancel()
