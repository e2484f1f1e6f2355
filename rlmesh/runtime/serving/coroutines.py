"""Coroutines of served methods: their context, waiting for one on a member's thread, and cancelling one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rlmesh.runtime.serving.activity_board import Board
    from rlmesh.runtime.serving.incoming import IncomingCall
    from rlmesh.runtime.serving.served_objects import Method

T = TypeVar("T")

_CHECK_S = 1.0
"""Interval at which a thread that waits for a coroutine checks whether the process is ending."""


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
                words[at], words[at + 1] = time.perf_counter_ns(), method.number


def await_elsewhere(
    incoming: IncomingCall, value: Awaitable[Any], post: Callable[..., Any], ending: Callable[[], bool],
    board: Board | None, *, closing: bool = False,
) -> Any:  # fmt: skip
    """The result of a coroutine that was returned by a method which had looked like a plain function.

    The member's thread waits, so that the method keeps its place and its slot until the coroutine has ended.

    Args:
        incoming: the call of the method.
        post: runs a function on the loop where the coroutine runs.
        ending: returns True if the process is ending.
        board: records the method while the coroutine runs.
        closing: run the coroutine even if the call was cancelled.
    """
    done: Future[Any] = Future()
    context = copy_context()

    def begin() -> None:
        task = asyncio.get_running_loop().create_task(_awaiting(incoming.method, board, value), context=context)
        task.add_done_callback(partial(_hand_over, done, value))
        if closing:
            return
        incoming.task = task
        if incoming.cancelled:
            task.cancel()

    post(begin)
    while True:
        try:
            return done.result(_CHECK_S)
        except TimeoutError:
            if done.done():
                raise
            if ending():  # The loop may have ended first.
                raise asyncio.CancelledError from None


async def _awaiting(method: Method, board: Board | None, value: Awaitable[Any]) -> Any:
    return await InContext(_recorded(method, board, value), copy_context(), board, method)


async def _recorded(method: Method, board: Board | None, value: Awaitable[Any]) -> Any:
    method.begins(board, method.loop_word, time.perf_counter_ns())
    try:
        return await value
    finally:
        if board is not None:
            board.words[method.loop_word + 1] = 0


def _hand_over(done: Future[Any], value: Awaitable[Any], task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is None:
        done.set_result(task.result())
        return
    if asyncio.iscoroutine(value):
        value.close()  # The coroutine may not have begun.
    done.set_exception(asyncio.CancelledError() if task.cancelled() else error)


def cancel_task(incoming: IncomingCall) -> None:
    """Cancel a call's task if it has begun. Runs on the task's loop.

    A task that is cancelled before its first step would never free its place; such a task checks by itself whether its
    call was cancelled.
    """
    if incoming.started_ns and incoming.task is not None and not incoming.context.over:
        incoming.task.cancel()
