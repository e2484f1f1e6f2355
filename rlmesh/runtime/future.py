"""`Future`: a `concurrent.futures.Future` that can also be awaited and says which member it waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Generator, Sequence
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED
from concurrent.futures._base import PENDING as PENDING
from typing import Any, NoReturn, Protocol, TypeVar

from rlmesh.errors import CallCancelled, UsageError, WouldDeadlock
from rlmesh.runtime.calling.call_stats import own_run_queue_ns
from rlmesh.runtime.calling.unretrieved import SharedReport, UnretrievedError
from rlmesh.runtime.process import forked
from rlmesh.wire.codec import Deferred
from rlmesh.wire.passed import RemoteRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loop_threads: dict[int, str] = {}
"""Threads whose loops receive answers, by their idents, with the names of their runtimes."""

transition = allocate_lock()
"""Guards the step from pending to done of every future. It is held for a few instructions only, so one lock is enough;
a lock and a condition per future would cost more than the rest of a call."""


def _after_fork() -> None:
    _loop_threads.clear()
    transition._at_fork_reinit()  # type: ignore[attr-defined]


forked.reset_in_children(_after_fork)


def register_loop_thread(name: str) -> int:
    ident = threading.get_ident()
    _loop_threads[ident] = name
    return ident


def unregister_loop_thread(ident: int) -> None:
    _loop_threads.pop(ident, None)


def refuse_to_block(what: Callable[[], str]) -> None:
    """Raise `WouldDeadlock` if the current thread is the one that must produce the answer."""
    name = _loop_threads.get(threading.get_ident())
    if name is not None:
        raise WouldDeadlock(
            f"waiting for {what()} would block the loop of runtime {name!r}, which must receive the answer: "
            "use `await future` here, or wait in another thread"
        )


class FutureOrigin(Protocol):
    """The work behind a future: the call, or the calls, that will end it."""

    def describe(self) -> str:
        """The members and methods that the future waits for, in a few words."""
        ...

    def explain(self) -> str:
        """The same, with what is known of the members that must answer."""
        ...

    def cancel(self) -> None:
        """End the work: the future was cancelled."""
        ...

    def waiter_woke(self, lag_ns: int, run_queue_ns: int) -> None:
        """Record that a waiting thread ran ``lag_ns`` after the answer was there, ``run_queue_ns`` of it without a
        core."""
        ...

    def leave_at_producer(self) -> None:
        """Allow the result to stay in the process that makes it, until it is fetched."""
        ...

    def value_needed(self, *, blocks: bool = False) -> None:
        """Get the value here soon. With ``blocks`` this thread waits for it and has nothing else to do."""
        ...

    def settled(self) -> bool:
        """True if the work is done although the future has no value yet."""
        ...

    def members(self) -> Sequence[Future[Any]] | None:
        """The futures whose results, as a list, are this future's result; None for a single call."""
        ...


class StoredValue(Protocol):
    """A result that its producer stores until it is needed."""

    ref: RemoteRef

    def fetch_for(self, future: Future[Any]) -> None:
        """Get the value, and end ``future`` with it."""
        ...


reducers: list[Callable[[Future[Any]], tuple[Any, ...]]] = []
"""Pickles futures that are arguments of calls: `rlmesh.runtime.calling.future_arguments` adds its function when the
first of them is met."""


def refuse_to_pickle() -> NoReturn:
    """Raises:
    Deferred: this thread does not encode the arguments of a call.
    """
    raise Deferred(
        "a Future cannot be stored or sent by itself: pass it as an argument of a call, which takes its value from its "
        "producer, or use its .result()"
    )


class _SettledCallback:
    """A callback that needs no value: it also runs if the result stays at its producer."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[Any], object]) -> None:
        self.fn = fn

    def __call__(self, future: Any) -> None:
        self.fn(future)


class Future(concurrent.futures.Future[T]):
    """The future result of a call.

    Usable from plain threads (``.result()``) and from any running loop (``await``). Waiting needs no timeout of
    its own: each call has a deadline and fails at it. Works with `concurrent.futures.wait` and ``as_completed``.
    """

    # One future is made per call, so a new one has two attributes: the others are defaults of the class until they are
    # needed, and the condition of the base class is made on its first use.
    _state = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    _waiters: list[Any] = []  # noqa: RUF012 (replaced, never changed in place, before anybody can append)
    _done_callbacks: tuple[Callable[[Any], object], ...] = ()
    _blocked: tuple[Any, ...] = ()
    _made_condition: threading.Condition | None = None
    _value_needed = False
    stored: StoredValue | None = None
    """The result at its producer, if it stayed there because the future was passed on as an argument."""
    what = "a call"
    """The call's name, for the messages of a batch."""
    resolved_ns = 0
    _retrieved = False
    _unretrieved: UnretrievedError | None = None
    _report: SharedReport | None = None
    """Shared with the futures whose errors are logged as one."""

    def __init__(self, origin: FutureOrigin | None = None) -> None:
        self._origin = origin
        self._fork = forked.count

    # For concurrent.futures.wait and as_completed, which lock a future by its condition.
    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        self._need_value()
        with transition:
            if self._made_condition is None:
                self._waiters = []
                self._made_condition = threading.Condition()
            return self._made_condition

    def waiting_for(self) -> str:
        """The call that this future waits for: role, rank, method, since when, and what is known of that member: its
        connection, its process, the last line of its log. Empty once the future is done."""
        origin = self._origin
        return "" if origin is None or self.done() else origin.explain()

    def done(self) -> bool:
        """True if the call is over.

        If the future was passed on as an argument of another call, its value may still be at the producer.
        """
        if self._state is not PENDING or self.stored is not None:
            return True
        origin = self._origin
        if origin is not None:
            self._refuse_child()
            return origin.settled()
        return False

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
        error = self._exception
        if error is not None:
            self.mark_retrieved()
            try:
                raise error
            finally:
                del error  # Else the traceback and this frame keep each other alive.
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the answer is there; gives its error, or None."""
        if self._state is PENDING:
            self._block(timeout)
        error = self._exception
        if error is not None:
            self.mark_retrieved()
        return error

    def share_report(self, report: SharedReport) -> None:
        """Log one error only of all futures that share ``report``."""
        self._report = report
        if (unretrieved := self._unretrieved) is not None:
            unretrieved.report = report

    def mark_retrieved(self) -> None:
        """Keep the error out of the log when this future is collected: it was retrieved, or is reported elsewhere."""
        self._retrieved = True
        unretrieved, self._unretrieved = self._unretrieved, None
        if unretrieved is not None:
            unretrieved.retrieved()

    def _block(self, timeout: float | None) -> None:
        """Wait until the future is done; measure how long this thread took to wake once the answer was there."""
        if threading.get_ident() in _loop_threads:
            refuse_to_block(self._described)
        self._need_value(blocks=True)
        origin = self._origin
        before_ns = own_run_queue_ns()
        gate = allocate_lock()
        gate.acquire()
        with transition:
            if self._state is not PENDING:
                return
            self._blocked = (*self._blocked, gate)
        if not gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            with transition:
                if self._state is PENDING:
                    self._blocked = tuple(other for other in self._blocked if other is not gate)
                    raise TimeoutError(f"no answer after {timeout} s: still waiting for {self._described()}")
        if origin is not None:
            origin.waiter_woke(time.perf_counter_ns() - self.resolved_ns, own_run_queue_ns() - before_ns)

    def set_result(self, result: T) -> None:
        if not self.end(result, None):
            raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        if not self.end(None, exception):
            raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")

    def cancel(self) -> bool:
        """Cancel the work: a queued call never starts, a coroutine is cancelled, nested calls too."""
        if self._state is PENDING:
            self._refuse_child()
        origin = self._origin
        error = CallCancelled(f"the call was cancelled: {self._described()}")
        if self.end(None, error, CANCELLED_AND_NOTIFIED):
            stored, self.stored = self.stored, None
            if stored is None and origin is not None:
                origin.cancel()
            return True
        return self._state is CANCELLED_AND_NOTIFIED

    def set_running_or_notify_cancel(self) -> bool:
        return self._state is PENDING

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self._need_value()
        self.on_value(fn)

    def on_value(self, fn: Callable[[Future[T]], object]) -> None:
        """As `add_done_callback`, but a value that stays at its producer is not fetched for the callback."""
        with transition:
            if self._state is PENDING:
                self._done_callbacks = (*self._done_callbacks, fn)
                return
        self._run_callback(fn)

    def on_settled(self, fn: Callable[[Future[T]], object]) -> None:
        """Run ``fn`` once the call is over, wherever its value is."""
        with transition:
            if self._state is PENDING and self.stored is None:
                self._done_callbacks = (*self._done_callbacks, _SettledCallback(fn))
                return
        self._run_callback(fn)

    def as_argument(self) -> T:
        """This future, typed as its value: ``group.call(Actor.forward, future.as_argument())``.

        A future can be passed as it is; this method is for type checkers, which see a future in the place of a value.
        """
        return self  # type: ignore[return-value]

    def leave_at_producer(self) -> None:
        """Let the value stay at its producer, unless it has been sent already."""
        origin = self._origin
        if self._state is PENDING and self.stored is None and origin is not None:
            origin.leave_at_producer()

    def set_stored(self, stored: StoredValue) -> None:
        """Settle the future with a value that stays at its producer. On the runtime's loop."""
        with transition:
            if self._state is not PENDING:
                return
            self.stored = stored
            settled = [callback for callback in self._done_callbacks if type(callback) is _SettledCallback]
            self._done_callbacks = tuple(c for c in self._done_callbacks if type(c) is not _SettledCallback)
        if self._value_needed:
            stored.fetch_for(self)
        for callback in settled:
            self._run_callback(callback)

    def _need_value(self, *, blocks: bool = False) -> None:
        """Get the value into this process: a thread, a task or a callback waits for it."""
        if self._state is not PENDING:
            return
        if self._fork != forked.count:
            self._refuse_child()
        self._value_needed = True
        stored, origin = self.stored, self._origin
        if stored is not None:
            stored.fetch_for(self)
        elif origin is not None:
            origin.value_needed(blocks=blocks)

    def _refuse_child(self) -> None:
        """Raise UsageError in a forked child of the process that made the call."""
        if self._fork != forked.count:
            raise UsageError(f"the answer to this call comes to the process that made it: {forked.refusal('it')}")

    def end(self, value: T | None, error: BaseException | None, state: str = FINISHED) -> bool:
        """Set a value or an error; False if the future has ended already, which changes nothing."""
        unretrieved = UnretrievedError(error, self._report) if error is not None and state is FINISHED else None
        with transition:
            if self._state is not PENDING:
                if unretrieved is not None:
                    unretrieved.retrieved()
                return False
            self._result, self._exception = value, error
            if unretrieved is not None:
                self._unretrieved = unretrieved
            self.resolved_ns = time.perf_counter_ns()
            self._state = state
            blocked, callbacks, condition = self._blocked, self._done_callbacks, self._made_condition
            self._blocked = self._done_callbacks = ()
            # Break the cycle between the future and its call. Then the result, and the shared memory that it may lie
            # in, is freed with its last user, and not by a garbage collection some time later.
            self._origin = None
        if unretrieved is not None and self._retrieved:
            # Not by `mark_retrieved`: another thread may take `_unretrieved` from this future at the same moment.
            unretrieved.retrieved()
            self._unretrieved = None
        if unretrieved is not None:
            unretrieved.report = self._report  # `share_report` may have been called meanwhile.
        for gate in blocked:
            gate.release()
        if condition is not None:
            with condition:
                for waiter in self._waiters:
                    _notify(waiter, self)
                condition.notify_all()
        for callback in callbacks:
            try:  # `_run_callback`, written out because this runs once per call.
                callback(self)
            except Exception:
                logger.exception("a callback of %r raised", self)
        return True

    def _run_callback(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r raised", self)

    def __reduce__(self) -> tuple[Any, ...]:
        return reducers[0](self) if reducers else refuse_to_pickle()

    @property
    def has_value(self) -> bool:
        """True if the value is in this process."""
        return self._state is FINISHED and self._exception is None

    def members(self) -> Sequence[Future[Any]] | None:
        origin = self._origin
        return origin.members() if origin is not None else None

    def _described(self) -> str:
        return self._origin.describe() if self._origin is not None else "a call"

    def __await__(self) -> Generator[Any, None, T]:
        if self._state is PENDING:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            thread = threading.get_ident()

            def wake(_: object) -> None:
                if threading.get_ident() == thread:
                    set_done(waiter)  # The answer arrived on the waiting loop itself: no wake-up through its pipe.
                    return
                try:
                    loop.call_soon_threadsafe(set_done, waiter)
                except RuntimeError:
                    pass  # The waiting loop was closed meanwhile.

            self.add_done_callback(wake)
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()


def set_done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _notify(waiter: Any, future: Future[Any]) -> None:
    """Notify a waiter of `concurrent.futures`."""
    if future.cancelled():
        waiter.add_cancelled(future)
    elif future._exception is not None:
        waiter.add_exception(future)
    else:
        waiter.add_result(future)
