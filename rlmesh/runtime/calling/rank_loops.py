"""Calls that a program makes to the ranks of an elastic role one by one: ``[rank.call("update") for rank in group]``.

To rlmesh these are calls of their own, and each may wait for its rank to come back. But ranks count on each other: if
the group restarts in the middle of such a loop, the later calls would run alone in the new generation and wait for the
next calls of the others. So the handles of one `RoleGroup` remember whom they called last.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlmesh.runtime.calling.pending import PendingCall

MEMORY_NS = 1_000_000_000
"""A call that failed so long ago, or a notification that was sent so long ago, belongs to no loop that goes on."""


class Round:
    """The last calls through the handles of one group, one for each rank. A rank's second call begins a new round."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[str, PendingCall] = {}

    def add(self, call: PendingCall) -> None:
        if call.name in self._calls:
            self._calls = {}
        self._calls[call.name] = call

    def left_behind(self, call: PendingCall, generation: int) -> PendingCall | None:
        """A call of the round that went to an older generation and has no result; None if ``call`` may go to this
        one."""
        now_ns = time.perf_counter_ns()
        for other in self._calls.values():
            if other is call or other.peer is None or other.incarnation >= generation:
                continue
            future = other.future
            if future is None:
                if now_ns - other.started_ns < MEMORY_NS:
                    return other
            elif not future.done() or (not future.has_value and now_ns - future.resolved_ns < MEMORY_NS):
                return other
        return None
