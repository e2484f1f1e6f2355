"""`VirtualLoop`: an event loop in virtual time, which jumps to the next timer instead of waiting for it.

::

    with VirtualLoop() as loop:
        loop.run(main())        # minutes of timeouts, in milliseconds

Within its ``with`` block, deadlines of calls follow the loop's time. Sockets work if both ends belong to this loop:
other threads and processes run in real time, in which hours of the loop pass in a moment.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from rlmesh.runtime.process import clock

T = TypeVar("T")

REAL_LIMIT_S = 5.0
"""Real seconds that the loop waits for I/O when it has no timer to jump to."""


class NothingLeft(RuntimeError):
    """The loop would wait for ever: no timer is set, and no I/O arrived."""


class _Selector(selectors.DefaultSelector):
    """Polls the sockets without waiting, and advances the virtual time instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.loop.jump(timeout)
            return super().select(0)
        ready = super().select(REAL_LIMIT_S)
        if not ready:
            names = ", ".join(task.get_name() for task in asyncio.all_tasks(self.loop))
            raise NothingLeft(
                f"after {self.loop.time():.3f} virtual seconds the loop waits without a timer, and nothing came within "
                f"{REAL_LIMIT_S:g} real seconds: {names} would wait for ever"
            )
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; use it as a context manager.

    Args:
        start_s: the initial time in seconds.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._virtual_s = start_s
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Advance the time without running due callbacks."""
        self._virtual_s += seconds

    def advance(self, seconds: float) -> None:
        """Run all callbacks of the next ``seconds``."""
        self.run_until_complete(asyncio.sleep(seconds))

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine until it completes."""
        return self.run_until_complete(main)

    def __enter__(self) -> VirtualLoop:
        self._real_clock = clock.now
        clock.now = self.time
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            tasks = asyncio.all_tasks(self)
            for task in tasks:
                task.cancel()
            if tasks:
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            clock.now = self._real_clock
            self.close()
