"""The end of an agent or a master that has no memory to go on.

An exception that is logged, or that ends a task which nobody awaits, leaves its work undone: a message is lost, or the
node is never registered. Without memory this may be any work, and the job would wait for it. The process ends instead:
an agent's guardian reports the end, and an agent restarts its master.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Coroutine
from typing import Any, NoReturn

from rlmesh.agent.protocol import OUT_OF_MEMORY

__all__ = ["EndWithoutMemory", "end_tasks_without_memory", "end_without_memory", "lacks_memory"]


def lacks_memory(error: object) -> bool:
    """True if an exception says that there is no memory."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def end_without_memory() -> NoReturn:
    """End this process with ``OUT_OF_MEMORY``. An orderly end would need memory too."""
    os.write(2, b"out of memory: this process cannot go on, and ends\n")
    os._exit(OUT_OF_MEMORY)


class EndWithoutMemory(logging.Handler):
    """Ends this process at the first record with an exception that says that there is no memory."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and lacks_memory(record.exc_info[1]):
            end_without_memory()


def end_tasks_without_memory(loop: asyncio.AbstractEventLoop) -> None:
    """End this process when a task or a callback of the loop fails for want of memory."""
    loop.set_task_factory(_task)  # type: ignore[arg-type]  # typeshed's protocol is narrower than asyncio's calls
    loop.set_exception_handler(_on_exception)


def _task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(_watched(work), loop=loop, **options)
    # A task that is cancelled before its first step never awaits the work, which would warn of it.
    task.add_done_callback(lambda _: work.close())
    return task


async def _watched(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (MemoryError, OSError) as error:
        if lacks_memory(error):
            end_without_memory()
        raise


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if lacks_memory(context.get("exception")):
        end_without_memory()
    loop.default_exception_handler(context)
