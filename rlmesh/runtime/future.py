"""`Future`: a `concurrent.futures.Future` that can also be awaited and knows whom it waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Generator, Sequence
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, NoReturn, TypeVar

from rlmesh.errors import CallCancelled, GroupCallError, Unserializable, WouldDeadlock
from rlmesh.runtime.timing import GroupTimer, own_run_queue_ns

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loop_threads: dict[int, str] = {}
"""Idents of the threads whose loop produces answers, with the name of their runtime."""

_transition = allocate_lock()
"""Guards the step from pending to done of every future. Held for a few instructions only, so one is enough;
a lock and a condition per future would cost more than the rest of a call."""


def register_loop_thread(name: str) -> int:
    ident = threading.get_ident()
    _loop_threads[ident] = name
    return ident


def unregister_loop_thread(ident: int) -> None:
    _loop_threads.pop(ident, None)


def refuse_to_block(what: str) -> None:
    """Raise `WouldDeadlock` if the current thread is the one that must produce the answer."""
    name = _loop_threads.get(threading.get_ident())
    if name is not None:
        raise WouldDeadlock(
            f"waiting for {what} would block the loop of runtime {name!r}, which must receive the answer: "
            "use `await future` here, or wait in another thread"
        )


class Future(concurrent.futures.Future[T]):
    """The result of a call that is on its way.

    Usable from plain threads (``.result()``) and from any running loop (``await``). Waiting needs no timeout of
    its own: each call has a deadline and fails at it. Works with `concurrent.futures.wait` and ``as_completed``.
    """

    # Attributes of the base class (state, result, waiters) are kept; its condition is made only if somebody asks.
    __slots__ = ("_blocked", "_on_cancel", "_waits_for", "resolved_ns", "timer")

    def __init__(
        self, waits_for: Callable[[], str] | None = None, on_cancel: Callable[[], None] | None = None
    ) -> None:
        self._state = PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Any], object]] = []
        self._blocked: list[Any] = []
        self._waits_for = waits_for
        self._on_cancel = on_cancel
        self.timer: GroupTimer | None = None
        self.resolved_ns = 0

    # For concurrent.futures.wait and as_completed, which lock a future by its condition.
    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        with _transition:
            found: threading.Condition | None = self.__dict__.get("_made_condition")
            if found is None:
                found = self.__dict__["_made_condition"] = threading.Condition()
        return found

    def waiting_for(self) -> str:
        """Whom it waits for: role, rank, method, since when. Empty once it is done."""
        return "" if self.done() or self._waits_for is None else self._waits_for()

    def done(self) -> bool:
        return self._state is not PENDING

    def running(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return self._state is CANCELLED_AND_NOTIFIED

    def result(self, timeout: float | None = None) -> T:
        """Block until the answer is there.

        Args:
            timeout: seconds; None waits until the call's own deadline.

        Raises:
            WouldDeadlock: on the thread of the loop that must receive the answer.
            CallError: the call failed; see `rlmesh.errors`.
            TimeoutError: ``timeout`` passed; the call goes on.
        """
        if self._state is PENDING:
            self._block(timeout)
        if self._state is CANCELLED_AND_NOTIFIED:
            raise CallCancelled(f"the call was cancelled: {self._described()}")
        error = self._exception
        if error is not None:
            try:
                raise error
            finally:
                del error  # Else the traceback and this frame keep each other alive.
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the answer is there; its error, or None."""
        if self._state is PENDING:
            self._block(timeout)
        if self._state is CANCELLED_AND_NOTIFIED:
            return CallCancelled(f"the call was cancelled: {self._described()}")
        return self._exception

    def _block(self, timeout: float | None) -> None:
        """Wait until it is done; note how long this thread took to wake once the answer was there."""
        refuse_to_block(self.waiting_for() or "a future")
        before_ns = own_run_queue_ns()
        gate = allocate_lock()
        gate.acquire()
        with _transition:
            if self._state is not PENDING:
                return
            self._blocked.append(gate)
        if not gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            with _transition:
                if self._state is PENDING:
                    self._blocked.remove(gate)
                    raise TimeoutError(f"no answer after {timeout} s: still waiting for {self._described()}")
        if self.timer is not None and self.resolved_ns:
            self.timer.woke(time.perf_counter_ns() - self.resolved_ns, own_run_queue_ns() - before_ns)

    def set_result(self, result: T) -> None:
        if not self._finish(FINISHED, result, None):
            raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        if not self._finish(FINISHED, None, exception):
            raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")

    def cancel(self) -> bool:
        """Cancel the work: a queued call never starts, a coroutine is cancelled, nested calls too."""
        if self._finish(CANCELLED_AND_NOTIFIED, None, None):
            hook, self._on_cancel = self._on_cancel, None
            if hook is not None:
                hook()
            return True
        return self._state is CANCELLED_AND_NOTIFIED

    def set_running_or_notify_cancel(self) -> bool:
        return self._state is PENDING

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        with _transition:
            if self._state is PENDING:
                self._done_callbacks.append(fn)
                return
        self._run_callback(fn)

    def _finish(self, state: str, result: T | None, exception: BaseException | None) -> bool:
        with _transition:
            if self._state is not PENDING:
                return False
            self._result, self._exception = result, exception
            self.resolved_ns = time.perf_counter_ns()
            self._state = state
            blocked, self._blocked = self._blocked, []
            callbacks, self._done_callbacks = self._done_callbacks, []
            condition: threading.Condition | None = self.__dict__.get("_made_condition")
        for gate in blocked:
            gate.release()
        if condition is not None:
            with condition:
                for waiter in self._waiters:
                    _tell(waiter, self)
                condition.notify_all()
        for callback in callbacks:
            self._run_callback(callback)
        return True

    def _run_callback(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r raised", self)

    def __reduce__(self) -> NoReturn:
        raise Unserializable("a Future cannot be sent to another process: pass its .result()")

    def _described(self) -> str:
        return self._waits_for() if self._waits_for is not None else "a call"

    def __await__(self) -> Generator[Any, None, T]:
        if self._state is PENDING:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            thread = threading.get_ident()

            def wake(_: object) -> None:
                if threading.get_ident() == thread:
                    _set(waiter)  # The answer arrived on the waiting loop itself: no wake-up through its pipe.
                    return
                try:
                    loop.call_soon_threadsafe(_set, waiter)
                except RuntimeError:
                    pass  # The waiting loop was closed meanwhile: nobody is left to wake.

            self.add_done_callback(wake)
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _tell(waiter: Any, future: Future[Any]) -> None:
    """Notify a waiter of `concurrent.futures`."""
    if future.cancelled():
        waiter.add_cancelled(future)
    elif future._exception is not None:
        waiter.add_exception(future)
    else:
        waiter.add_result(future)


def resolve(future: Future[T], value: T) -> None:
    """Set a result unless the future was cancelled meanwhile."""
    future._finish(FINISHED, value, None)


def reject(future: Future[Any], error: BaseException) -> None:
    """Set an error unless the future was cancelled meanwhile."""
    future._finish(FINISHED, None, error)


class GroupOutcomes(list[Any]):
    """Results of all members, errors in their places: what ``return_exceptions=True`` gives."""

    def raise_all(self) -> None:
        """Raise a `GroupCallError` if any member failed."""
        failures = {rank: value for rank, value in enumerate(self) if isinstance(value, Exception)}
        if failures:
            results = {rank: value for rank, value in enumerate(self) if rank not in failures}
            raise group_error(failures, results)


def group_error(failures: dict[int, Exception], results: dict[int, Any]) -> GroupCallError:
    error = GroupCallError(
        f"{len(failures)} of {len(failures) + len(results)} members failed", list(failures.values())
    )
    error.failures = failures
    error.results = results
    return error


def gather(futures: Sequence[Future[Any]], *, return_exceptions: bool = False) -> Future[list[Any]]:
    """All results in order, or the first failure as soon as it is there."""
    since = time.monotonic()

    def waits_for() -> str:
        waiting = [f.waiting_for() for f in futures if not f.done()]
        return f"{len(waiting)} of {len(futures)} members for {time.monotonic() - since:.1f} s: {'; '.join(waiting)}"

    def cancel_all() -> None:
        for future in futures:
            future.cancel()

    whole: Future[list[Any]] = Future(waits_for, cancel_all)
    left = len(futures)
    lock = threading.Lock()

    def one_done(future: concurrent.futures.Future[Any]) -> None:
        nonlocal left
        if not return_exceptions and not whole.done():
            error = future.exception()
            if error is not None:
                reject(whole, error)
        with lock:
            left -= 1
            last = left == 0
        if last and not whole.done():
            resolve(whole, [_outcome(f) for f in futures] if return_exceptions else [f.result() for f in futures])

    if not futures:
        whole.set_result([])
    else:
        whole.timer = futures[0].timer
    for future in futures:
        future.add_done_callback(one_done)
    return whole


def _outcome(future: Future[Any]) -> Any:
    error = future.exception()
    return error if error is not None else future.result()
