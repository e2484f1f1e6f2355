"""`Future`: a `concurrent.futures.Future` that can also be awaited and knows whom it waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

from rlmesh.errors import CallCancelled, CallError, GroupCallError, Unserializable, WouldDeadlock
from rlmesh.runtime.timing import GroupTimer, own_run_queue_ns

T = TypeVar("T")

_loop_threads: dict[int, str] = {}
"""Idents of the threads whose loop produces answers, with the name of their runtime."""


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
    its own: each call has a deadline and fails at it.
    """

    def __init__(
        self, waits_for: Callable[[], str] | None = None, on_cancel: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._waits_for = waits_for
        self._on_cancel = on_cancel
        self.timer: GroupTimer | None = None
        self.resolved_ns = 0

    def waiting_for(self) -> str:
        """Whom it waits for: role, rank, method, since when. Empty once it is done."""
        return "" if self.done() or self._waits_for is None else self._waits_for()

    def result(self, timeout: float | None = None) -> T:
        """Block until the answer is there.

        Args:
            timeout: seconds; None waits until the call's own deadline.

        Raises:
            WouldDeadlock: on the thread of the loop that must receive the answer.
            CallError: the call failed; see `rlmesh.errors`.
            TimeoutError: ``timeout`` passed; the call goes on.
        """
        if not self.done():
            refuse_to_block(self.waiting_for() or "a future")
            self._block(timeout)
        try:
            return super().result(0)
        except concurrent.futures.CancelledError:
            raise CallCancelled(f"the call was cancelled: {self._described()}") from None
        except TimeoutError as error:
            if isinstance(error, CallError) or self.done():
                raise
            raise TimeoutError(f"no answer after {timeout} s: still waiting for {self.waiting_for()}") from None

    def _block(self, timeout: float | None) -> None:
        """Wait until it is done; note how long this thread took to wake once the answer was there."""
        before_ns = own_run_queue_ns()
        try:
            super().exception(timeout)
        except (concurrent.futures.CancelledError, TimeoutError):
            return
        if self.timer is not None and self.resolved_ns:
            self.timer.woke(time.perf_counter_ns() - self.resolved_ns, own_run_queue_ns() - before_ns)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            refuse_to_block(self.waiting_for() or "a future")
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Cancel the work: a queued call never starts, a coroutine is cancelled, nested calls too."""
        cancelled = super().cancel()
        if cancelled:
            # Tells waiters of `concurrent.futures.wait` and lets result() see the end at once.
            self.set_running_or_notify_cancel()
            hook, self._on_cancel = self._on_cancel, None
            if hook is not None:
                hook()
        return cancelled

    def __reduce__(self) -> NoReturn:
        raise Unserializable("a Future cannot be sent to another process: pass its .result()")

    def _described(self) -> str:
        return self._waits_for() if self._waits_for is not None else "a call"

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def wake(_: object) -> None:
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


def resolve(future: Future[T], value: T) -> None:
    """Set a result unless the future was cancelled meanwhile."""
    if not future.done():
        future.resolved_ns = time.perf_counter_ns()
        try:
            future.set_result(value)
        except concurrent.futures.InvalidStateError:
            pass


def reject(future: Future[Any], error: BaseException) -> None:
    """Set an error unless the future was cancelled meanwhile."""
    if not future.done():
        future.resolved_ns = time.perf_counter_ns()
        try:
            future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass


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
            if future.cancelled():
                reject(whole, CallCancelled("a member's call was cancelled"))
            elif (error := future.exception()) is not None:
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
    if future.cancelled():
        return CallCancelled("the call was cancelled")
    error = future.exception()
    return error if error is not None else future.result()
