"""What benchmarks/rpc.py asks of a runtime: `Peer`, and `Body`, which its members run.

A runtime is described by a module ``rpc_<name>`` with a class ``Peer``. Nothing here imports a runtime, so that
each can live in an environment that holds no other.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

WARM_UP = 100


class Body:
    """What a member does."""

    _kept: Any = None

    async def echo(self, value: Any) -> Any:
        return value

    def echo_def(self, value: Any) -> Any:
        return value

    def take(self, data: Any) -> tuple[float, float]:
        return float(data[0]), float(data[-1])

    def give(self, mib: int, stamp: int) -> Any:
        """A tensor that is always the same memory with another first number."""
        if self._kept is None or self._kept.numel() != mib << 18:
            self._kept = tensor(mib)
        self._kept[0] = stamp
        return self._kept

    def pid(self) -> int:
        return os.getpid()

    def collect(self) -> None:
        gc.collect()

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Peer(Protocol):
    """One runtime, seen from a caller on a running loop; ``i`` is a member's rank.

    Each method does its work in the runtime's own and fastest way.
    """

    async def start(self, members: int) -> None:
        """Start members; returns when each has answered."""

    async def stop(self) -> None:
        """End the members."""

    async def call(self, i: int, method: str, *args: Any) -> Any: ...

    async def window(self, i: int, method: str, count: int) -> Sequence[Any]:
        """Calls ``method(0)`` to ``method(count - 1)``, all on their way at once; the answers in order."""

    async def group(self, method: str, *args: Any) -> Sequence[Any]:
        """The same call to all members."""

    async def between(self, calls: int) -> list[float]:
        """Seconds of echoes from a coroutine of member 0 to member 1, one after the other."""

    def from_thread(self, calls: int) -> list[float]:
        """The same from the calling thread, which has no loop, to member 0."""


def tensor(mib: int) -> Any:
    """Float32 numbers of their own."""
    import torch

    return torch.arange(mib << 18, dtype=torch.float32)


async def seconds_of(call: Callable[[int], Awaitable[Any]], calls: int) -> list[float]:
    """Seconds of calls one after the other, after a warm-up; each answers with its number."""
    times = []
    for number in range(-WARM_UP, calls):
        start = time.perf_counter()
        answer = await call(number)
        times.append(time.perf_counter() - start)
        expect(answer, number)
    return times[WARM_UP:]


def seconds_of_blocking(call: Callable[[int], Any], calls: int) -> list[float]:
    """As `seconds_of`, on a plain thread."""
    times = []
    for number in range(-WARM_UP, calls):
        start = time.perf_counter()
        answer = call(number)
        times.append(time.perf_counter() - start)
        expect(answer, number)
    return times[WARM_UP:]


def expect(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError(f"the answer is {got!r:.200}, not {wanted!r:.200}")
