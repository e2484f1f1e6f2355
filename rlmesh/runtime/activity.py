"""`RuntimeActivity`: what one runtime does and waits for, for the job's master and for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING

from rlmesh.runtime.calling.calls import Calls
from rlmesh.runtime.calling.peer_status import Serving, Waiting
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.dispatch import Dispatcher

if TYPE_CHECKING:
    from rlmesh.runtime.serving.wait_report import BlockedCalls, CallKey

_ANSWERS_POLL_S = 0.005


class RuntimeActivity:
    """The activity of one runtime. All methods may be called from any thread.

    Args:
        name: of the runtime.
        post: runs a function on the runtime's loop.

    Attributes:
        call_stats: the calls that this process made.
    """

    def __init__(
        self, name: str, calls: Calls, dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop,
        post: Callable[..., None],
    ) -> None:  # fmt: skip
        self.call_stats = calls.stats
        self._name, self._calls, self._dispatcher, self._loop, self._post = name, calls, dispatcher, loop, post
        self._main_work: tuple[str, float] = ("", 0.0)
        """The user code, other than methods, that occupies the main thread, and since when."""

    # Calls that this process makes.

    def pending(self) -> list[str]:
        """The calls without an answer: one line per call."""
        return [call.describe() for call in self._calls.pending()]

    def waiting(self) -> tuple[Waiting, ...]:
        """The calls without an answer, with what is known of the members that must answer; the oldest first."""
        calls = sorted(self._calls.pending(), key=lambda call: call.started_ns)
        return tuple(self._calls.peers.waiting(call) for call in calls)

    def await_answers(self, timeout_s: float) -> None:
        """Wait until no call of this process to a member is in flight, at most ``timeout_s`` seconds."""
        end = clock.now() + timeout_s
        while clock.now() < end and any(c.future and not c.name.startswith("@") for c in self._calls.pending()):
            time.sleep(_ANSWERS_POLL_S)
        taken_in = Event()
        self._post(taken_in.set)  # The loop runs this after the answer that it may be reading at this moment.
        taken_in.wait(max(0.0, end - clock.now()))

    # Calls that this process serves.

    def serving(self) -> tuple[Serving, ...]:
        """The calls that this process was asked and has not ended, whether a caller waits for them or not."""
        now_ns = time.perf_counter_ns()
        return tuple(incoming.status(now_ns) for incoming in self._dispatcher.calls() if incoming.is_shown)

    def running_on(self, for_s: float) -> tuple[Serving, ...]:
        """The calls that have been running here for at least ``for_s`` seconds although they were cancelled or timed
        out."""
        now_ns = time.perf_counter_ns()
        calls = (incoming.status(now_ns) for incoming in self._dispatcher.unawaited() if incoming.cancelled)
        return tuple(call for call in calls if call.runs and call.since_s >= for_s)

    @contextmanager
    def occupied(self, what: str) -> Iterator[None]:
        """Mark that user code that is no method, such as ``A:0.setup()``, occupies the main thread."""
        self._main_work = (what, clock.now())
        try:
            yield
        finally:
            self._main_work = ("", 0.0)

    def blocked(self, older_s: float) -> BlockedCalls:
        """The calls that run here and wait for answers, and the calls that are queued behind them.

        Args:
            older_s: report nothing unless a call has been here for at least this many seconds.
        """
        from rlmesh.runtime.serving.wait_report import blocked_calls

        what, since = self._main_work
        age_s = clock.now() - since if what else 0.0
        return blocked_calls(self._dispatcher, self._name, (what, age_s), time.perf_counter_ns(), older_s)

    def refuse_queued(self, calls: Collection[CallKey], text: str) -> None:
        """Let calls that have not begun fail with `WouldDeadlock`."""
        from rlmesh.runtime.serving.wait_report import refuse_queued

        self._post(refuse_queued, self._dispatcher, self._loop, frozenset(calls), text)

    # Signs of life.

    def note_activity(self) -> None:
        """Record a sign of life of this process."""
        self._calls.active_at = clock.now()

    def notify_aside(self, peer: MemberHandle, method: str, *args: object) -> None:
        """Notify a peer, but do not count that as a sign of life: a process that only sends reports about itself is
        quiet."""
        active_at, began_at = self._calls.active_at, clock.now()
        peer.notify(method, *args)
        if began_at <= self._calls.active_at <= clock.now():
            self._calls.active_at = active_at

    def quiet_s(self) -> float:
        """Seconds since this process sent a call, got an answer, sent an item of a stream, or gave another sign of
        life. Calls that it serves do not count."""
        return max(0.0, clock.now() - max(self._calls.active_at, self._dispatcher.active_at))
