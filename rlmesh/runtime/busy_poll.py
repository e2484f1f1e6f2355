"""Waiting for a quick answer without going to sleep.

A core that has gone idle needs longer to wake than most short calls take: 30 to 60 µs on a virtual machine, of 150. A
loop that awaits the only call on its way, of a member whose last answer was quick, polls its sockets until the answer
is there, or until it is no longer quick. Other tasks of the loop run meanwhile as ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlmesh.runtime.pending import PendingCall


class BusyPoll:
    """Of one runtime, on the loop that calls.

    Args:
        loop: the running loop.
        limit_s: an answer that takes longer is not waited for in this way, nor is the next one of that member.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop, self._limit_ns = loop, int(limit_s * 1e9)
        self._thread = threading.get_ident()
        self._call: PendingCall | None = None
        self.turns = 0
        """How often the loop looked."""

    def await_answer(self, call: PendingCall) -> None:
        """The call, which was sent, is awaited."""
        if self._call is None and threading.get_ident() == self._thread and self._is_quick(call):
            self._call = call
            self._loop.call_soon(self._turn)

    def _is_quick(self, call: PendingCall) -> bool:
        peer = call.peer
        return peer is not None and 0 < peer.answer_ns < self._limit_ns and call.table.on_their_way() == 1

    def _turn(self) -> None:
        call = self._call
        if (
            call is None
            or call.peer is None
            or call.call_id not in call.peer.pending
            or time.perf_counter_ns() - call.started_ns > self._limit_ns
        ):
            self._call = None
            return
        self.turns += 1
        self._loop.call_soon(self._turn)
