"""`Future`: a `concurrent.futures.Future` that can also be awaited and knows whom it waits for."""

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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlmesh.errors import CallCancelled, UsageError, WouldDeadlock
from rlmesh.runtime.calling.unretrieved import ErrorRetrieved, Unheard
from rlmesh.runtime.process import forked
from rlmesh.runtime.process.scheduling_delay import own_run_queue_ns

if TYPE_CHECKING:
    from rlmesh.runtime.calling.future_arguments import KeptResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loop_threads: dict[int, str] = {}
"""Idents of the threads whose loop produces answers, with the name of their runtime."""

transition = allocate_lock()
"""Guards the step from pending to done of every future. Held for a few instructions only, so one is enough;
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
    """What stands behind a future: the call, or the calls, that will end it."""

    def describe(self) -> str:
        """Whom it waits for, in a few words."""
        ...

    def explain(self) -> str:
        """The same, with what is known of whoever must answer."""
        ...

    def cancel(self) -> None:
        """The future was cancelled: end the work."""
        ...

    def woke(self, lag_ns: int, run_queue_ns: int) -> None:
        """A thread that waited ran ``lag_ns`` after the answer was there, ``run_queue_ns`` of it without a core."""
        ...

    def stay(self) -> None:
        """The result may stay where it is made until somebody fetches it."""
        ...

    def want(self, *, blocks: bool = False) -> None:
        """Somebody waits for the value here; with ``blocks`` it is this thread, which has nothing else to do."""
        ...

    def settled(self) -> bool:
        """Whether the work is done although the future has no value yet."""
        ...

    def members(self) -> Sequence[Future[Any]] | None:
        """The futures whose results together are this one's, as a list; None for a single call."""
        ...


class _Settle:
    """A callback that needs no value: a result that stays at its producer is as good."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[Any], object]) -> None:
        self.fn = fn

    def __call__(self, future: Any) -> None:
        self.fn(future)


class Future(concurrent.futures.Future[T]):
    """The result of a call that is on its way.

    Usable from plain threads (``.result()``) and from any running loop (``await``). Waiting needs no timeout of
    its own: each call has a deadline and fails at it. Works with `concurrent.futures.wait` and ``as_completed``.
    """

    # One future is made per call, so it starts as an object of one attribute: the rest are defaults of the class
    # until they are needed, and the condition of the base class is made only if somebody asks for it.
    _state = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    _waiters: list[Any] = []  # noqa: RUF012 (replaced, never changed in place, before anybody can append)
    _done_callbacks: tuple[Callable[[Any], object], ...] = ()
    _blocked: tuple[Any, ...] = ()
    _made_condition: threading.Condition | None = None
    _wanted = False
    kept: KeptResult | None = None
    """Where the result is, if it stayed at its producer since the future was passed on as an argument."""
    what = "a call"
    """Whose result it is, for the messages of a batch."""
    resolved_ns = 0
    _heard = False
    _unheard: Unheard | None = None
    together: ErrorRetrieved | None = None
    """Shared with futures whose errors are told as one."""

    def __init__(self, origin: FutureOrigin | None = None) -> None:
        self._origin = origin
        self._fork = forked.count

    # For concurrent.futures.wait and as_completed, which lock a future by its condition.
    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        self._want()
        with transition:
            if self._made_condition is None:
                self._waiters = []
                self._made_condition = threading.Condition()
            return self._made_condition

    def waiting_for(self) -> str:
        """Whom it waits for: role, rank, method, since when, and what is known of that member: its connection, its
        process, the last line of its log. Empty once it is done."""
        origin = self._origin
        return "" if origin is None or self.done() else origin.explain()

    def done(self) -> bool:
        """Whether the call is over. Its value may still have to come from its producer, if the future was passed on
        as an argument of another call before it was done."""
        if self._state is not PENDING or self.kept is not None:
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
            self.heard()
            try:
                raise error
            finally:
                del error  # Else the traceback and this frame keep each other alive.
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the answer is there; its error, or None."""
        if self._state is PENDING:
            self._block(timeout)
        error = self._exception
        if error is not None:
            self.heard()
        return error

    def share(self, together: ErrorRetrieved) -> None:
        """Of the errors of futures that share it, one is told."""
        self.together = together
        if (unheard := self._unheard) is not None:
            unheard.together = together

    def heard(self) -> None:
        """Somebody knows of its error, or will by other means: it is not logged when this future is collected."""
        self._heard = True
        unheard, self._unheard = self._unheard, None
        if unheard is not None:
            unheard.heard()

    def _block(self, timeout: float | None) -> None:
        """Wait until it is done; note how long this thread took to wake once the answer was there."""
        refuse_to_block(self._described)
        self._want(blocks=True)
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
            origin.woke(time.perf_counter_ns() - self.resolved_ns, own_run_queue_ns() - before_ns)

    def set_result(self, result: T) -> None:
        if not self._finish(FINISHED, result, None):
            raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        if not self._finish(FINISHED, None, exception):
            raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")

    def cancel(self) -> bool:
        """Cancel the work: a queued call never starts, a coroutine is cancelled, nested calls too."""
        if self._state is PENDING:
            self._refuse_child()
        origin = self._origin
        error = CallCancelled(f"the call was cancelled: {self._described()}")
        if self._finish(CANCELLED_AND_NOTIFIED, None, error):
            kept, self.kept = self.kept, None
            if kept is None and origin is not None:
                origin.cancel()
            return True
        return self._state is CANCELLED_AND_NOTIFIED

    def set_running_or_notify_cancel(self) -> bool:
        return self._state is PENDING

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self._want()
        self.on_value(fn)

    def on_value(self, fn: Callable[[Future[T]], object]) -> None:
        """As `add_done_callback`, but a value that stays at its producer is not fetched for it."""
        with transition:
            if self._state is PENDING:
                self._done_callbacks = (*self._done_callbacks, fn)
                return
        self._run_callback(fn)

    def on_settled(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn`` once the call is over, wherever its value is."""
        with transition:
            if self._state is PENDING and self.kept is None:
                self._done_callbacks = (*self._done_callbacks, _Settle(fn))
                return
        self._run_callback(fn)

    def as_argument(self) -> T:
        """This future, where a call takes its value: ``group.call(Actor.forward, future.as_argument())``.

        A future can be passed as it is; type checkers, who see a future in the place of a value, accept this.
        """
        return self  # type: ignore[return-value]

    def stay(self) -> None:
        """Let the value stay at its producer, if it is not on its way already."""
        origin = self._origin
        if self._state is PENDING and self.kept is None and origin is not None:
            origin.stay()

    def stayed(self, kept: KeptResult) -> None:
        """The value stays at its producer. On the runtime's loop."""
        with transition:
            if self._state is not PENDING:
                return
            self.kept = kept
            settle = [callback for callback in self._done_callbacks if type(callback) is _Settle]
            self._done_callbacks = tuple(c for c in self._done_callbacks if type(c) is not _Settle)
        if self._wanted:
            kept.fetch_for(self)
        for callback in settle:
            self._run_callback(callback)

    def _want(self, *, blocks: bool = False) -> None:
        """Somebody waits for the value itself."""
        if self._state is not PENDING:
            return
        self._refuse_child()
        self._wanted = True
        kept, origin = self.kept, self._origin
        if kept is not None:
            kept.fetch_for(self)
        elif origin is not None:
            origin.want(blocks=blocks)

    def _refuse_child(self) -> None:
        if self._fork != forked.count:
            raise UsageError(f"the answer to this call comes to the process that made it: {forked.refusal('it')}")

    def end(self, value: T | None, error: BaseException | None) -> None:
        """Give it a value or an error, unless it has ended."""
        self._finish(FINISHED, value, error)

    def _finish(self, state: str, result: T | None, exception: BaseException | None) -> bool:
        unheard = Unheard(exception, self.together) if exception is not None and state is FINISHED else None
        with transition:
            if self._state is not PENDING:
                if unheard is not None:
                    unheard.heard()
                return False
            self._result, self._exception = result, exception
            if unheard is not None:
                self._unheard = unheard
            self.resolved_ns = time.perf_counter_ns()
            self._state = state
            blocked, callbacks, condition = self._blocked, self._done_callbacks, self._made_condition
            self._blocked = self._done_callbacks = ()
            # The call knows its future: without the way back the result is freed by its last user, not by the
            # garbage collector some time later, and so is the shared memory that it may lie in.
            self._origin = None
        if unheard is not None and self._heard:
            unheard.heard()  # Itself, since another thread may just be taking it from this future.
            self._unheard = None
        if unheard is not None:
            unheard.together = self.together  # It may have been shared meanwhile.
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

    def __reduce__(self) -> tuple[Any, ...]:
        from rlmesh.runtime.calling.future_arguments import reduce_future

        return reduce_future(self)

    @property
    def has_value(self) -> bool:
        """Whether its value is in this process."""
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
