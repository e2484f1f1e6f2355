"""Coroutines of served methods: one that a member's thread waits for, and cancelling one from the runtime's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from rlmesh.runtime.serving.call_context import InContext

if TYPE_CHECKING:
    from rlmesh.runtime.serving.activity_board import Board
    from rlmesh.runtime.serving.incoming import IncomingCall
    from rlmesh.runtime.serving.served_objects import Method

_LOOK_S = 1.0
"""So often a thread that waits for a coroutine looks whether the process is ending."""


def await_elsewhere(
    incoming: IncomingCall, value: Awaitable[Any], post: Callable[..., Any], ending: Callable[[], bool],
    board: Board | None, *, closing: bool = False,
) -> Any:  # fmt: skip
    """The result of a coroutine that a method gave which seemed to be a plain one. The member's thread waits, so that
    the method has its place, and its slot, until it is over.

    Args:
        incoming: its call.
        post: runs a function on the loop where the coroutine runs.
        ending: whether the process ends.
        board: where it is noted when the coroutine runs.
        closing: run it also if the call was cancelled.
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
            return done.result(_LOOK_S)
        except TimeoutError:
            if done.done():
                raise
            if ending():  # The loop may have ended first.
                raise asyncio.CancelledError from None


async def _awaiting(method: Method, board: Board | None, value: Awaitable[Any]) -> Any:
    return await InContext(_noted(method, board, value), copy_context(), board, method)


async def _noted(method: Method, board: Board | None, value: Awaitable[Any]) -> Any:
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
        value.close()  # It may not have begun.
    done.set_exception(asyncio.CancelledError() if task.cancelled() else error)


def cancel_task(incoming: IncomingCall) -> None:
    """On the task's loop. A task that was cancelled before its first step would never run the lines that give its
    place back; it looks for itself whether it was cancelled."""
    if incoming.started_ns and incoming.task is not None and not incoming.context.over:
        incoming.task.cancel()
