"""The clocks of rlmesh, which do not follow the wall clock, since that may be set at any moment.

`now`
    For deadlines and durations within one process: monotonic, without the time in which the process was suspended.
    ``scontrol suspend``, a frozen container and a migrating virtual machine stop all processes of a job at once. The
    kernel's clock runs on meanwhile, so deadlines would pass although no process could do anything. The tick of a
    runtime's deadlines detects such a suspension by its own lateness.
`epoch`
    Seconds since the epoch for people and for files. Within a job it only grows: the driver sets it once, and it
    follows the machine's monotonic clock from then on, so that differences of two such times are durations.

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
"""Lateness of a tick from which the process counts as suspended meanwhile. Ticks come at least every 0.1 s."""
EPOCH_VARIABLE = "RLMESH_EPOCH"
"""Environment variable with a job's `epoch` for the processes below the driver: the boot id and the offset."""

now: Callable[[], float] = time.monotonic
"""The current time, in seconds. Call it as ``clock.now()``, so that a replacement takes effect."""


class RunningTime:
    """A clock that leaves out the suspensions of the process that reads it. It must be read often.

    Args:
        source: the clock, in seconds, that continues during a suspension.
        still_s: an interval between two reads above which the process counts as suspended.
        lost_s: the sum of earlier suspensions, which are left out.
        on_suspended: called with the start, by this clock, and the seconds of each new suspension.
    """

    def __init__(
        self, source: Callable[[], float], still_s: float = STILL_S, lost_s: float = 0.0,
        on_suspended: Callable[[float, float], object] = lambda at, seconds: None,
    ) -> None:  # fmt: skip
        self._source, self._still_s, self.lost_s, self._on_suspended = source, still_s, lost_s, on_suspended
        self._read_at = source()

    def __call__(self) -> float:
        at = self._source()
        away_s, self._read_at = at - self._read_at, at
        if away_s > self._still_s:
            self.lost_s += away_s
            self._on_suspended(at - self.lost_s, away_s)
        return at - self.lost_s


# The clock of this process. Until the first suspension `now` is the kernel's clock itself, which costs least.

_beaters: list[asyncio.AbstractEventLoop] = []
_beat_at = 0.0
_beating = threading.Lock()
_lost_s = 0.0


def begin(loop: asyncio.AbstractEventLoop) -> None:
    """Register a loop that calls `beat` every 0.1 s from now on, while it runs."""
    global _beat_at
    with _beating:
        _beaters[:] = [each for each in _beaters if not each.is_closed()]
        if not any(each.is_running() for each in _beaters if each is not loop):
            # No other loop is running, so the last beat is old for that reason, and not because of a suspension.
            _beat_at = time.monotonic()
        _beaters.append(loop)


def end(loop: asyncio.AbstractEventLoop) -> None:
    """Unregister a loop that does not call `beat` any more."""
    with _beating, contextlib.suppress(ValueError):
        _beaters.remove(loop)


def beat() -> None:
    """Note that this process runs, and leave out of `now` the time since the last beat if that is too long ago."""
    global _beat_at, _lost_s, now
    with _beating:
        if not _beaters:
            return  # a suspension cannot be distinguished from a time without loops
        at = time.monotonic()
        away_s, _beat_at = at - _beat_at, at
        if away_s > STILL_S and (now is time.monotonic or now is _running):
            _lost_s += away_s
            now = _running


def _running() -> float:
    return time.monotonic() - _lost_s


class Timer:
    """Calls a function on a loop after a delay in which the process was running; `cancel` prevents the call.

    The timer waits in parts. A part counts with its planned length, even if it ended late after a suspension.
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
        self._handle = self._loop.call_later(part_s, self._check, part_s)

    def _check(self, part_s: float) -> None:
        self._left_s -= part_s
        if self._left_s > 0:
            self._wait()
            return
        callback, args = self._call
        callback(*args)


@contextlib.asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """Like ``asyncio.timeout``, for seconds in which the process was running."""
    import asyncio

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = Timer(loop, seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()


def wait_for(condition: threading.Condition, predicate: Callable[[], object], seconds: float) -> bool:
    """Like ``Condition.wait_for``, for seconds in which the process was running; True if the predicate is true.

    The wait has parts, each of which counts at most with its planned length, even if it ended late.
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
    """Set the variable by which processes that are started with ``env`` have the same `epoch`."""
    env[EPOCH_VARIABLE] = epoch_here()


def epoch_here() -> str:
    """This process's `epoch` as a text, for other processes on this machine."""
    return f"{_boot()}:{_epoch_offset()!r}"


def epoch_of(text: str) -> float:
    """The current time by the clock that `epoch_here` described as ``text``; by this process's own if invalid here."""
    offset = _inherited(text)
    return epoch() if offset is None else time.clock_gettime(time.CLOCK_BOOTTIME) + offset


def _epoch_offset() -> float:
    global _offset
    if _offset is None:
        _offset = _inherited(os.environ.get(EPOCH_VARIABLE, ""))
    if _offset is None:  # the only moment at which the wall clock is read
        _offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return _offset


def _inherited(text: str) -> float | None:
    boot, _, offset = text.partition(":")
    try:
        return float(offset) if boot and boot == _boot() else None
    except ValueError:
        return None


def _boot() -> str:
    """The id of this boot of the machine, for which alone its monotonic clock is valid."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _forked() -> None:
    """Forget the parent's loops in a child, where they do not run."""
    global _beating
    _beating = threading.Lock()
    _beaters.clear()


os.register_at_fork(after_in_child=_forked)
