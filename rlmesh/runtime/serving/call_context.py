"""The context of a running method: the deadline, held slots and nested calls of the call that it serves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from rlmesh.runtime.process import clock

if TYPE_CHECKING:
    from rlmesh.runtime.future import Future
    from rlmesh.runtime.serving.activity_board import Board
    from rlmesh.runtime.serving.served_objects import Method


T = TypeVar("T")


class CallContext:
    """The call that the current thread or task is serving.

    Attributes:
        chain: serial slots held by this call and by the calls that led to it.
        deadline: the time, by `rlmesh.runtime.process.clock`, at which the caller gives up.
        over: the method has returned. Tasks and callbacks that it started still have this context, but no longer act on
            behalf of the call.
    """

    __slots__ = ("_children", "cancelled", "chain", "deadline", "over")

    def __init__(self, chain: tuple[str, ...], deadline: float) -> None:
        self.chain = chain
        self.deadline = deadline
        self._children: WeakSet[Future[Any]] | None = None
        self.cancelled = False
        self.over = False

    def add_child(self, future: Future[Any]) -> None:
        """Register a call that was made while serving this call."""
        if self._children is None:
            self._children = WeakSet()
        self._children.add(future)
        if self.cancelled:
            future.cancel()

    def remaining_s(self) -> float:
        return self.deadline - clock.now()

    def cancel(self) -> None:
        """Cancel all calls that were made on behalf of this call."""
        self.cancelled = True
        for child in list(self._children or ()):
            child.cancel()


current_call: ContextVar[CallContext | None] = ContextVar("rlmesh_current_call", default=None)


def served_call() -> CallContext | None:
    """The unanswered call on whose behalf the current thread or task acts; None if there is none."""
    context = current_call.get()
    return None if context is None or context.over else context


class InContext(Generic[T]):
    """Awaits a method's coroutine, which runs in a context other than its task's.

    It erases the method from the activity board, if there is one, while the coroutine waits, and records it again when
    the coroutine resumes. The coroutine itself records its begin and its end.
    """

    __slots__ = ("_board", "_context", "_coroutine", "_method")

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], context: Context, board: Board | None, method: Method
    ) -> None:
        self._coroutine, self._context, self._board, self._method = coroutine, context, board, method

    def __await__(self) -> Generator[Any, Any, T]:
        run, coroutine = self._context.run, self._coroutine
        resume: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            try:
                waited = run(resume, value)
            except StopIteration as end:
                result: T = end.value
                return result
            if (board := self._board) is not None:
                board.words[self._method.loop_word + 1] = 0
            try:
                value = yield waited
                resume = coroutine.send
            except BaseException as error:  # The task was cancelled or closed.
                resume, value = coroutine.throw, error
            if board is not None:
                words, method = board.words, self._method
                at = method.loop_word
                words[at], words[at + 1] = perf_counter_ns(), method.number
