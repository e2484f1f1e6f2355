"""Where a method runs: what a function is, under its decorators.

A decorator that is not async itself hides that a method is: ``torch.no_grad()`` over an ``async def`` gives a plain
function that returns a coroutine. Such a method runs on the loop of ``async def`` methods, as it would without the
decorator. One whose nature only its result tells runs on the member's thread, which waits for the coroutine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

_RUNS_IT_ITSELF = frozenset({"run", "run_until_complete", "run_coroutine_threadsafe", "async_to_sync", "syncify"})
"""A decorator that uses one of these gives a plain function: it runs the coroutine and returns its result."""
_BELOW = ("_partialmethod", "__partialmethod__", "__wrapped__")


def is_on_loop(function: Callable[..., Any]) -> bool:
    """Whether a function is a coroutine function or an asynchronous generator, or a decorated one."""
    for layer in _layers(function):
        if inspect.iscoroutinefunction(layer) or inspect.isasyncgenfunction(layer):
            return True
        if inspect.isgeneratorfunction(layer):
            return False
        if isinstance(layer, FunctionType) and not _RUNS_IT_ITSELF.isdisjoint(layer.__code__.co_names):
            return False
    return False


def _layers(function: Any) -> Iterator[Any]:
    """The function, and what is below its decorators, partials and objects, from the outside in."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        if isinstance(function, functools.partial | functools.partialmethod):
            function = function.func
        elif isinstance(function, staticmethod | classmethod) or inspect.ismethod(function):
            function = function.__func__
        elif (below := next(filter(None, (_attribute(function, name) for name in _BELOW)), None)) is not None:
            function = below
        elif not isinstance(function, type) and not inspect.isroutine(function):
            function = getattr(type(function), "__call__", None)  # noqa: B004 (the method, not whether there is one)
        else:
            return


def _attribute(function: Any, name: str) -> Any:
    """Of the object itself: an object that answers to every name is no decorator."""
    own = getattr(function, "__dict__", None)
    return own.get(name) if isinstance(own, dict) else None
