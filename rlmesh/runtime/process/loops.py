"""Event loops on their own threads, functions posted to a loop from other threads, and closing at exit."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import uvloop

from rlmesh.runtime.connections.channel import turn_loops
from rlmesh.runtime.future import Future

logger = logging.getLogger(__name__)

_THREAD_JOIN_S = 5.0

with_threads: weakref.WeakSet[Any] = weakref.WeakSet()
"""The runtimes of this process that have their own threads."""


def _close_all() -> None:
    """Close runtimes that the program left open: threads must not run while the interpreter shuts down."""
    for runtime in list(with_threads):
        runtime.close()


# Close before the handlers of atexit run, as concurrent.futures does: after pyzmq's handler, the frames that ZeroMQ
# still holds cannot be freed any more.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class Posts:
    """A queue of functions that a loop runs. Thread-safe.

    The loop is woken once for all functions posted before it runs, since a wake-up costs more than the work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._woken = False

    def put(self, fn: Callable[..., Any], *args: Any) -> None:
        self._queue.append((fn, args))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self.run)
            except RuntimeError:
                self._woken = False  # The loop is closed, since the process is ending.

    def forked(self) -> None:
        """In a forked child, drop functions that are posted (also by the garbage collector): the loop does not run."""
        self._queue = deque(maxlen=0)
        self._woken = True

    def run(self) -> None:
        self._woken = False
        while self._queue:
            fn, args = self._queue.popleft()
            try:
                fn(*args)
            except Exception:
                logger.exception("a function posted to a loop raised")


class LoopThread:
    """An event loop on its own thread."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.posts = Posts(self.loop)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        ident = threading.get_ident()
        turn_loops[ident] = self.loop
        try:
            self.loop.run_forever()
        finally:
            turn_loops.pop(ident, None)
            self.loop.close()

    def is_here(self) -> bool:
        """True if the calling thread is the loop's."""
        return threading.get_ident() == self._thread.ident

    def run(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` on the loop and return its result."""
        done: Future[Any] = Future()

        async def body() -> None:
            try:
                done.set_result(fn())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(body()))
        return done.result(30.0)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(_THREAD_JOIN_S)
        if self._thread.is_alive():
            logger.warning("thread %s does not end: a coroutine blocks its loop", self._thread.name)

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()

        async def finish() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=_THREAD_JOIN_S / 2)
            self.loop.stop()

        self.loop.create_task(finish())
