"""Several roles in one process: each acts as itself, whichever thread or loop runs its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rlmesh.job.context import WorkerContext, acting_as

__all__ = ["acting_for"]


def acting_for(context: WorkerContext, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, within which ``current_worker()`` is ``context``. It stays what it is: a plain function, a
    coroutine function, or a generator of either kind."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def stream(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            try:
                while True:
                    with acting_as(context):
                        try:
                            item = await anext(made)
                        except StopAsyncIteration:
                            return
                    yield item
            finally:
                with acting_as(context):
                    await made.aclose()

        return stream
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def items(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            try:
                while True:
                    with acting_as(context):  # only while it runs: between two items the thread is others'
                        try:
                            item = next(made)
                        except StopIteration:
                            return
                    yield item
            finally:
                with acting_as(context):
                    made.close()

        return items
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with acting_as(context):
                return await function(*args, **kwargs)

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with acting_as(context):
            made = function(*args, **kwargs)
        if inspect.isawaitable(made) or inspect.isasyncgen(made):  # An async one, under a decorator that is not.
            return acting_for(context, _gives_back(made))()
        return made

    return run


def _gives_back(made: Any) -> Callable[..., Any]:
    async def awaited() -> Any:
        return await made

    async def iterated() -> Any:
        async for item in made:
            yield item

    return iterated if inspect.isasyncgen(made) else awaited
