"""Signals to a launcher: how they are handled, which give notice that the job must end soon, and which end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlmesh.agent.processes.ownership import signals_are_shared
from rlmesh.runtime.process.forked import handle

__all__ = ["HEEDED", "gives_notice", "handling"]

HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher handles, besides those of the terminal."""


def gives_notice(number: int) -> bool:
    """True if the signal lets all ranks stop together: SIGUSR1, SIGUSR2, and under Slurm SIGTERM, which precedes a
    preemption."""
    return number in (signal.SIGUSR1, signal.SIGUSR2) or (number == signal.SIGTERM and signals_are_shared())


@contextmanager
def handling(numbers: Sequence[int], on_signal: Callable[[int], object]) -> Iterator[None]:
    """Call ``on_signal`` for these signals within the block; only on the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handle(number, lambda number, _: on_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
