"""Jobs that belong to a program: they are started from anywhere, and end with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmesh import JobHandle

__all__ = ["end_with_the_program", "outside_of_loops"]

WATCH_S = 0.5


def outside_of_loops(fn: Callable[[], Any]) -> None:
    """Call ``fn``; if an event loop runs on this thread, as in a notebook's cell, on another thread.

    A cell may block its loop, as any computation in it does; rlmesh's plain ``with`` blocks refuse loops in general.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        fn()
        return
    with ThreadPoolExecutor(1, thread_name_prefix="rlmesh-envs-start") as pool:
        pool.submit(fn).result()


def end_with_the_program(handle: JobHandle) -> None:
    """Stop the job when the main thread ends: the job's own thread would keep a program without `stop` alive."""

    def watch() -> None:
        while not handle.done():
            threading.main_thread().join(WATCH_S)
            if not threading.main_thread().is_alive():
                handle.stop("the program has ended")
                return

    threading.Thread(target=watch, name="rlmesh-envs-end", daemon=True).start()
