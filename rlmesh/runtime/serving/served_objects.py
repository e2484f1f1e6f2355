"""The objects that a process serves under names, and their exported methods."""

from __future__ import annotations

import inspect
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rlmesh.errors import MethodNotFound, UsageError
from rlmesh.runtime.rpc import exported_functions, mark_of
from rlmesh.runtime.serving.activity_board import ASYNC, INLINE, Board
from rlmesh.runtime.serving.executors import SerialExecutor, ThreadPool
from rlmesh.runtime.serving.method_kinds import is_on_loop


class Method:
    """An exported method of a served object. ``slot`` names the serial slot that a running call of the method holds."""

    def __init__(self, owner: Served, name: str, function: Callable[..., Any]) -> None:
        mark = mark_of(function)
        self.owner, self.name, self.function = owner, name, function
        self.concurrent = mark.concurrent if mark is not None else 1
        self.is_async = is_on_loop(function)
        self.generator = function
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            self.function = _refusing(f"{owner.name}.{name}()", is_async=self.is_async)
        self.serial = self.concurrent == 1
        self.main_thread = mark is not None and mark.main_thread
        # Serial `def` methods share the member's one thread, so they share a slot.
        self.slot = f"{owner.name}.{name}" if self.is_async else owner.slot
        self.running = 0
        self.queue: deque[Any] = deque()
        """The calls (`IncomingCall`) that wait for a place."""
        self.lock = allocate_lock()
        self.number = 0
        """The method's number on the process's activity board; 0 if it has not run."""
        self.loop_word = INLINE if owner.inline else ASYNC
        """Index of the board's words that record the method while it runs on a loop."""
        self.pool: ThreadPool | None = None
        """The threads of a ``def`` method that runs several calls at once."""
        if not self.serial and not self.is_async:
            self.pool = ThreadPool(self.concurrent, f"rlmesh-{owner.name}-{name}")

    def put_on(self, board: Board) -> int:
        """Give the method its number on the activity board, when it runs for the first time."""
        self.number = board.number_of(self.label)
        return self.number

    def begins(self, board: Board | None, at: int, now_ns: int) -> None:
        """Record on the activity board that the method runs: since when in word ``at``, its number in the next word."""
        if board is not None:
            board.words[at], board.words[at + 1] = now_ns, self.number or self.put_on(board)

    @property
    def label(self) -> str:
        """The method's name for people: ``ACTOR:0.act()``."""
        return f"{self.owner.name}.{self.name}()"

    @property
    def shares_thread(self) -> bool:
        """True if the method's calls share one thread with the member's other serial ``def`` methods."""
        return self.serial and not self.is_async

    @property
    def waits_for_main(self) -> bool:
        """True if only the main thread may run the method, and other work occupies that thread."""
        return self.main_thread and self.shares_thread and not self.owner.executor.owned

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


class Served:
    """An object under a name.

    Args:
        inline: ``async def`` methods run on the runtime's loop.
        beside: another served object, whose thread of serial ``def`` methods this object shares.
    """

    def __init__(
        self, name: str, incarnation: int, functions: Mapping[str, Callable[..., Any]], *, inline: bool,
        beside: Served | None = None,
    ) -> None:  # fmt: skip
        self.name, self.incarnation, self.inline = name, incarnation, inline
        self.slot: str = beside.slot if beside is not None else f"{name}!{incarnation}"
        self.methods = {method: Method(self, method, function) for method, function in functions.items()}
        self.executor: SerialExecutor = beside.executor if beside is not None else SerialExecutor(name)

    def find(self, name: str) -> Method:
        found = self.methods.get(name)
        if found is None and (function := exported_functions().get(name)) is not None:
            found = self.methods[name] = Method(self, name, function)
        if found is None:
            import difflib

            near = difflib.get_close_matches(name, self.methods, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(sorted(self.methods)) or "none"
            raise MethodNotFound(
                f"{self.name} exports no method {name!r} (it exports: {known}){hint} "
                "Mark the method with @rpc to let other members call it"
            )
        return found

    def close(self) -> None:
        for method in self.methods.values():
            method.close()
        self.executor.close()


def _refusing(label: str, *, is_async: bool) -> Callable[..., Any]:
    """The function that runs when a generator method is called like an ordinary method."""

    def refuse(*_: object, **__: object) -> None:
        raise UsageError(f"{label} is a generator: take its items with stream() instead of call()")

    async def refuse_async(*args: object, **kwargs: object) -> None:
        refuse()

    return refuse_async if is_async else refuse
