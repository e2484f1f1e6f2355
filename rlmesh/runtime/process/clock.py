"""The clocks of rlmesh. None of them follows the wall clock, which somebody may set at any moment.

`now`
    For deadlines and durations within one process: monotonic, and without the time in which the process stood still.
    ``scontrol suspend``, a container that is frozen and a virtual machine that moves stop all processes of a job at
    once; when they go on, nobody has had the time that the kernel's clock shows. The tick of a runtime's deadlines
    finds such a standstill by its own lateness.
`epoch`
    Seconds since the epoch for people and for files. Within a job it only grows: it was set once, by the driver, and
    follows the machine's monotonic clock from then on, so differences of two such times are durations.

Tests replace `now` (`rlmesh.testing.VirtualLoop`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "EPOCH_VARIABLE", "STILL_S", "RunningTime", "Timer", "beat", "begin", "end", "epoch", "epoch_here", "epoch_of",
    "now", "share_epoch", "timeout", "wait_for",
]  # fmt: skip

STILL_S = 1.0
"""A process whose tick comes so much too late stood still. Ticks come every 0.1 s at least."""
EPOCH_VARIABLE = "RLMESH_EPOCH"
"""Hands a job's `epoch` to the processes below the driver: the boot that it holds for, and the offset."""

now: Callable[[], float] = time.monotonic
"""Call it as ``clock.now()``, so that a replaced clock is seen."""


class RunningTime:
    """A clock without the standstills of whoever reads it, as seconds of another clock. It must be read often.

    Args:
        source: the clock that goes on during a standstill.
        still_s: without being read for so long, the process stood still.
        lost_s: standstills that were left out before.
        told: called with each new standstill: when it began, by this clock, and its seconds.
    """

    def __init__(
        self, source: Callable[[], float], still_s: float = STILL_S, lost_s: float = 0.0,
        told: Callable[[float, float], object] = lambda at, seconds: None,
    ) -> None:  # fmt: skip
        self._source, self._still_s, self.lost_s, self._told = source, still_s, lost_s, told
        self._read_at = source()

    def __call__(self) -> float:
        at = self._source()
        away_s, self._read_at = at - self._read_at, at
        if away_s > self._still_s:
            self.lost_s += away_s
            self._told(at - self.lost_s, away_s)
        return at - self.lost_s


# The clock of this process. As long as it has not stood still, `now` is the kernel's clock itself, which costs least.

_beaters: list[asyncio.AbstractEventLoop] = []
_beat_at = 0.0
_beating = threading.Lock()
_lost_s = 0.0


def begin(loop: asyncio.AbstractEventLoop) -> None:
    """The loop calls `beat` every 0.1 s from now on, as long as it runs."""
    global _beat_at
    with _beating:
        _beaters[:] = [each for each in _beaters if not each.is_closed()]
        if not any(each.is_running() for each in _beaters if each is not loop):
            # Loops that no longer run left the last beat behind: its age is no standstill.
            _beat_at = time.monotonic()
        _beaters.append(loop)


def end(loop: asyncio.AbstractEventLoop) -> None:
    """The loop does not call `beat` any more."""
    with _beating, contextlib.suppress(ValueError):
        _beaters.remove(loop)


def beat() -> None:
    """This process runs. If it did not for a while, that while is left out of `now`."""
    global _beat_at, _lost_s, now
    with _beating:
        if not _beaters:
            return  # who looks at the clock cannot tell a standstill from a time without loops
        at = time.monotonic()
        away_s, _beat_at = at - _beat_at, at
        if away_s > STILL_S and (now is time.monotonic or now is _running):
            _lost_s += away_s
            now = _running


def _running() -> float:
    return time.monotonic() - _lost_s


class Timer:
    """Calls something on a loop after a delay in which the process was running; `cancel` keeps it from that.

    It waits in parts. A part that ends too late stood still for the rest, whoever else looks at the clock.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., object], *args: Any
    ) -> None:  # fmt: skip
        self._loop, self._left_s, self._call = loop, delay_s, (callback, args)
        self._wait()

    def cancel(self) -> None:
        self._handle.cancel()

    def _wait(self) -> None:
        part_s = max(0.0, min(self._left_s, STILL_S / 2))
        self._handle = self._loop.call_later(part_s, self._look, part_s)

    def _look(self, part_s: float) -> None:
        self._left_s -= part_s
        if self._left_s > 0:
            self._wait()
            return
        callback, args = self._call
        callback(*args)


@contextlib.asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, for seconds in which the process was running."""
    import asyncio

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = Timer(loop, seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()


def wait_for(condition: threading.Condition, predicate: Callable[[], object], seconds: float) -> bool:
    """As ``Condition.wait_for``, for seconds in which the process was running; whether the predicate is true.

    A part of the wait that ends too late stood still for the rest, whoever else looks at the clock.
    """
    left_s = seconds
    while not predicate():
        if left_s <= 0:
            return False
        part_s, began_at = min(left_s, STILL_S / 2), time.monotonic()
        condition.wait(part_s)
        left_s -= min(time.monotonic() - began_at, part_s)
    return True


# The time for people.

_offset: float | None = None


def epoch() -> float:
    """Seconds since the epoch, by a clock that never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) + _epoch_offset()


def share_epoch(env: MutableMapping[str, str]) -> None:
    """Let processes that are started with these variables have the same `epoch`."""
    env[EPOCH_VARIABLE] = epoch_here()


def epoch_here() -> str:
    """This process's `epoch` as a text, for others on this machine."""
    return f"{_boot()}:{_epoch_offset()!r}"


def epoch_of(text: str) -> float:
    """Seconds since the epoch now, by the clock of which `epoch_here` gave the text; else by this process's own."""
    offset = _inherited(text)
    return epoch() if offset is None else time.clock_gettime(time.CLOCK_BOOTTIME) + offset


def _epoch_offset() -> float:
    global _offset
    if _offset is None:
        _offset = _inherited(os.environ.get(EPOCH_VARIABLE, ""))
    if _offset is None:  # the one moment at which the wall clock counts
        _offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return _offset


def _inherited(text: str) -> float | None:
    boot, _, offset = text.partition(":")
    try:
        return float(offset) if boot and boot == _boot() else None
    except ValueError:
        return None


def _boot() -> str:
    """What tells this start of the machine from others: its monotonic clock holds for it alone."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _forked() -> None:
    """No loop of the parent ticks in its child."""
    global _beating
    _beating = threading.Lock()
    _beaters.clear()


os.register_at_fork(after_in_child=_forked)
