"""`EpisodeThread`: calls user code (tools, environments, agents) with deadlines; the error names the place."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

__all__ = ["EpisodeThread", "PlaceTimeout", "hanging_calls"]

MOST_HANGING = 1024
"""With so many threads stuck in calls, no further episode starts, since each thread keeps its memory."""

_hanging: set[EpisodeThread] = set()


class PlaceTimeout(Exception):
    """A deadline passed; the text names the place, such as ``turn 3 tool calculator: no answer in 5 s``."""


def hanging_calls() -> int:
    """The number of threads of this process that are stuck in a call whose deadline has passed."""
    return len(_hanging)


class EpisodeThread:
    """A thread for the tools, the environment or the agent of one episode.

    Code that blocks, even in an ``async`` function, then delays neither other episodes nor the endpoint. If a deadline
    passes, a coroutine is cancelled. A plain function cannot be cancelled: its thread is abandoned, and ends when the
    function returns.

    Args:
        name: name of the thread.

    Raises:
        RuntimeError: too many threads are stuck in calls.
    """

    def __init__(self, name: str) -> None:
        if len(_hanging) >= MOST_HANGING:
            raise RuntimeError(f"{len(_hanging)} calls of tools or environments hang in this process: repair these")
        self._name = name
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._runner: asyncio.Runner | None = None
        self._task: asyncio.Task[Any] | None = None
        self._lost = False

    async def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float, place: str,
        arguments: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Call a function, and await its result if this is a coroutine.

        Args:
            arguments: keyword arguments.
            timeout_s: time limit of the call.
            place: the place, for the text of the error.

        Raises:
            PlaceTimeout: the call took longer, or an earlier call did and still runs.
        """
        if self._lost:
            raise PlaceTimeout(f"{place}: an earlier call still runs")
        context = contextvars.copy_context()
        future: Future[Any] = Future()
        self._calls.put((lambda: context.run(function, *args, **(arguments or {})), future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.wait_for(asyncio.shield(waiter), timeout_s)
        except TimeoutError:
            if waiter.done():  # the function itself raised a TimeoutError
                raise
            self._give_up(waiter)
            raise PlaceTimeout(f"{place}: no answer in {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: asyncio.Future[Any]) -> None:
        self._lost = True
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller has gone
        _hanging.add(self)
        task, runner = self._task, self._runner
        if task is not None and runner is not None:
            with suppress(RuntimeError):  # the call has just ended
                runner.get_loop().call_soon_threadsafe(task.cancel)
        self.close()
        if self._thread is not None and not self._thread.is_alive():
            _hanging.discard(self)

    def close(self) -> None:
        """Let the thread end after its present call, without waiting for it."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of a thread that was closed and does not hang."""
        if self._thread is not None and not self._lost:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                self._carry_out(*call)
        finally:
            if self._runner is not None:
                self._runner.close()
            _hanging.discard(self)

    def _carry_out(self, function: Callable[[], Any], future: Future[Any]) -> None:
        try:
            value = function()
            if inspect.isawaitable(value):
                self._runner = self._runner or asyncio.Runner()
                value = self._runner.run(self._awaited(value))
        except Exception as error:
            # A coroutine cannot raise StopIteration.
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        except BaseException as error:  # sys.exit() or a cancelled coroutine is an error of this call only
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_result(value)

    async def _awaited(self, value: Any) -> Any:
        self._task = asyncio.current_task()
        try:
            return await value
        finally:
            self._task = None
