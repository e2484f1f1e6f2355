"""Finds out whether a method is asynchronous below its decorators, which decides where it runs.

A decorator that is not async itself hides that a method is: ``torch.no_grad()`` over an ``async def`` gives a plain
function that returns a coroutine. Such a method runs on the loop of ``async def`` methods, as it would without the
decorator. A method that turns out to be async only by its result runs on the member's thread, which waits for the
coroutine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

_RUNS_IT_ITSELF = frozenset({"run", "run_until_complete", "run_coroutine_threadsafe", "async_to_sync", "syncify"})
"""Names in the code of a decorator that runs the coroutine itself and so makes a plain function."""
_BELOW = ("_partialmethod", "__partialmethod__", "__wrapped__")


def is_on_loop(function: Callable[..., Any]) -> bool:
    """True if a function is a coroutine function or an asynchronous generator, perhaps below decorators."""
    for layer in _layers(function):
        if inspect.iscoroutinefunction(layer) or inspect.isasyncgenfunction(layer):
            return True
        if inspect.isgeneratorfunction(layer):
            return False
        if isinstance(layer, FunctionType) and not _RUNS_IT_ITSELF.isdisjoint(layer.__code__.co_names):
            return False
    return False


def _layers(function: Any) -> Iterator[Any]:
    """The function, and the functions below its decorators, partials and objects, from the outside in."""
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
    """An attribute in the object's own dict, since an object with a ``__getattr__`` for any name is no decorator."""
    own = getattr(function, "__dict__", None)
    return own.get(name) if isinstance(own, dict) else None
