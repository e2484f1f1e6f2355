"""Several roles in one process: the code of each role runs with its own worker context, on any thread or loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import AsyncGeneratorType
from typing import Any

from rlmesh.job.context import WorkerContext, acting_as

__all__ = ["acting_for"]


def acting_for(context: WorkerContext, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that ``current_worker()`` is ``context`` within it. The kind of function stays: plain function,
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
                    with acting_as(context):  # only while it runs: between two items other code uses the thread
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
        if (
            hasattr(kind := type(made), "__await__") or kind is AsyncGeneratorType
        ):  # an async function below a plain decorator
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
