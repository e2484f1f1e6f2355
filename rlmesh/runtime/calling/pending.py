"""Records of calls without an answer (`PendingCall`, `Cohort`, `RankLoop`), their connections and their deadlines.

`Calls` owns these records and changes them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rlmesh.errors import CallError, CallTimeout, Executed, PeerLost, StaleIncarnation
from rlmesh.runtime.calling.call_stats import CallGroup, CallRecorder, RunQueueMeter
from rlmesh.runtime.calling.peer_status import Waiting
from rlmesh.runtime.connections.address_book import MemberExit, split_name
from rlmesh.runtime.connections.channel import Channel, turn_loops
from rlmesh.runtime.future import Future, StoredValue
from rlmesh.runtime.process import clock
from rlmesh.wire.envelope import ANY_INCARNATION, Flag, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.future_arguments import PassedArguments, Payload

LOOP_MEMORY_NS = 1_000_000_000
"""A call that failed, or a notification that was sent, longer ago than this belongs to no loop that still runs."""
FINE_S = 0.02
COARSE_S = 1.0
_FINE_UP_TO_S = 10.0
_IDLE_TICK_S = 0.1


class DeadlineEntry(Protocol):
    deadline: float
    bucket: dict[int, DeadlineEntry] | None
    call_id: int


class AnswerPoll(Protocol):
    """Polls for an answer in place of the loop; see `BusyPoll`."""

    def block(self, call: PendingCall) -> None: ...

    def await_answer(self, call: PendingCall) -> None: ...


class PeerKnowledge(Protocol):
    """The methods of `PeerTable` that a pending call uses."""

    def waiting(self, call: PendingCall) -> Waiting: ...

    def lost_error(self, call: PendingCall, reason: str, executed: Executed) -> PeerLost: ...


class CallTable(Protocol):
    """The methods of `Calls` that a pending call uses."""

    meter: RunQueueMeter
    stats: CallRecorder

    @property
    def peers(self) -> PeerKnowledge: ...

    @property
    def busy_poll(self) -> AnswerPoll | None: ...

    def cancel(self, call: PendingCall) -> None: ...

    def leave_at_callee(self, call: PendingCall) -> None: ...


class ItemSink(Protocol):
    """Takes the items of a stream."""

    def on_item(self, number: int, frames: Frames) -> None: ...


class PendingCall:
    """One call to one peer, from ``call()`` to its answer."""

    # One is made per call: values that most calls never change are defaults of the class.
    frames: Frames
    bucket: dict[int, DeadlineEntry] | None = None
    call_id = 0
    sent_bytes = 0
    flags = 0
    future: Future[Any] | None = None
    peer: Peer | None = None
    source: ItemSink | None = None
    """Receives the items of a stream."""
    passed: PassedArguments | None = None
    """The futures among the arguments, until all of them have ended."""
    stored: Sequence[StoredValue] = ()
    """Results that their producers must keep until this call is over."""
    cohort: Cohort | None = None
    """The call to several ranks of an elastic role that this call is a part of."""
    rank_loop: RankLoop | None = None
    """The calls that the program makes to the ranks of the same group one by one."""
    wanted = ANY_INCARNATION
    """The only incarnation that may get this call, whatever the address book says."""
    poll_until_ns = 0
    """The time until which a waiting thread may poll for the answer itself."""

    def __init__(
        self, table: CallTable, name: str, method: str, timeout_s: float, chain: tuple[str, ...], endpoint: str | None,
        incarnation: int, payload: Payload, queue: bool, group: CallGroup | None,
    ) -> None:  # fmt: skip
        if isinstance(payload, list):
            self.frames = payload
        else:
            self.frames, self.passed = [], payload
        self.table, self.name, self.method, self.timeout_s, self.chain = table, name, method, timeout_s, chain
        self.endpoint, self.incarnation, self.queue, self.group = endpoint, incarnation, queue, group
        self.pinned = endpoint is not None
        """True if the call goes to one address, whichever process the address book has there."""
        if endpoint is None and incarnation != ANY_INCARNATION:
            self.wanted = incarnation
        self.started_ns = now_ns = time.perf_counter_ns()
        self.deadline = clock.now() + timeout_s
        self.run_queue_ns = table.meter.recent_ns(now_ns)

    def age_s(self) -> float:
        return (time.perf_counter_ns() - self.started_ns) / 1e9

    def describe(self) -> str:
        text = f"{self.name}.{self.method}() for {self.age_s():.1f} s"
        return text if self.passed is None else f"{text} (waits for an argument, from {self.passed.describe()})"

    def explain(self) -> str:
        return str(self.table.peers.waiting(self))

    def cancel(self) -> None:
        self.table.cancel(self)

    def leave_at_producer(self) -> None:
        self.table.leave_at_callee(self)

    def value_needed(self, *, blocks: bool = False) -> None:
        peer = self.peer
        if peer is not None and len(peer.pending) == 1:
            peer.channel.hurry()
            poll = self.table.busy_poll
            if poll is not None:
                if blocks:
                    poll.block(self)
                else:
                    poll.await_answer(self)

    def settled(self) -> bool:
        return False

    def members(self) -> None:
        return None

    def waiter_woke(self, lag_ns: int, run_queue_ns: int) -> None:
        self.table.stats.add_wake(self.name.partition(":")[0], self.method, lag_ns, run_queue_ns)

    def done(self, times: tuple[int, int, int] | None, received_bytes: int = 0) -> None:
        """Record where the time of this call went.

        Args:
            times: executed, queued and run-queue ns of the member; None without an answer.
        """
        now_ns = time.perf_counter_ns()
        if self.peer is not None:
            self.peer.answer_ns = now_ns - self.started_ns
        answered = times is not None
        executed_ns, queued_ns, run_queue_ns = times or (0, 0, 0)
        waited_ns = self.table.meter.recent_ns(now_ns) - self.run_queue_ns if answered else 0
        self.table.stats.add((
            self.name, self.method, self.call_id, self.started_ns, now_ns, answered, executed_ns, queued_ns,
            self.sent_bytes, received_bytes, waited_ns, run_queue_ns, self.group,
        ))  # fmt: skip

    def take_passed(self) -> BaseException | None:
        """Put passed values, or the names of stored ones, among the arguments.

        Returns:
            The error, if one of the values cannot be had.
        """
        passed, self.passed = self.passed, None
        assert passed is not None
        error = passed.error()
        if error is None:
            try:
                self.frames, self.stored = passed.payload()
            except Exception as unusable:
                error = unusable
        self.flags |= int(Flag.PASSED)
        if self.future is not None:
            self.future.on_settled(self._release_stored)
        return error

    def _release_stored(self, _: object) -> None:
        self.stored = ()

    def error(self, cls: type[CallError], text: str, executed: Executed) -> CallError:
        role, rank = split_name(self.name)
        return cls(text, role=role, rank=rank, method=self.method, call_id=self.call_id, executed=executed)

    def timeout_error(self, state: str, executed: Executed) -> CallError:
        """The error at the call's deadline."""
        text = (
            f"{self.name}.{self.method}() gave no answer within its deadline ({self.age_s():.2f} s): {state}. "
            "Raise it with group.options(timeout_s=…), or look at the member's log and stacks"
        )
        return self.error(CallTimeout, text, executed)

    def lost(self, reason: str, executed: Executed) -> PeerLost:
        """The error if the callee is gone."""
        return self.table.peers.lost_error(self, reason, executed)


class Peer:
    """A connection to one endpoint, and the calls that were sent over it or wait for room in its window."""

    def __init__(self, endpoint: str, channel: Channel, window: int) -> None:
        self.endpoint, self.channel = endpoint, channel
        self.window = self.normal_window = window
        """The number of calls that may be in flight at once; more where the peer announced it (`Concurrency`)."""
        self.pending: dict[int, PendingCall] = {}
        self.waiting: deque[PendingCall] = deque()
        self.blocked: deque[Any] = deque()
        """Locks of the plain threads that wait for room in the line of waiting calls."""
        self.queued_ns = 0
        """Queueing time, at the peer, of the call that it answered last."""
        self.answer_ns = 0
        """Round-trip time of the call that ended last."""
        self.opening: clock.Timer | None = None
        self.ending = False
        """The socket is closed, but the process was alive at the last check."""

    @property
    def is_full(self) -> bool:
        return bool(self.waiting) or len(self.pending) >= self.window

    def begun(self) -> Executed:
        """Value of ``executed`` in errors of calls to this peer: "no" before the handshake is over, since nothing is
        sent until then; else "maybe"."""
        return "maybe" if self.channel.authenticated else "no"

    def load(self) -> tuple[int, int]:
        """Calls of this process that wait or are in flight, and the last queueing time (ns)."""
        return len(self.pending) + len(self.waiting), self.queued_ns

    def wait_in_line(self, call: PendingCall) -> Any:
        """Append a call to the line of waiting calls, under the table's lock.

        Returns:
            A lock at which the calling thread must wait, if the line is too long and the thread runs no loop.
        """
        call.peer = self
        self.waiting.append(call)
        if len(self.waiting) <= self.window or threading.get_ident() in turn_loops or asyncio._get_running_loop():
            return None
        gate = allocate_lock()
        gate.acquire()
        self.blocked.append(gate)
        return gate

    def unblock_threads(self) -> None:
        """Under the table's lock: let threads that waited for room in the line go on."""
        while self.blocked and len(self.waiting) < self.window:
            self.blocked.popleft().release()


class Cohort:
    """The parts of one call to several ranks of an elastic role; `CohortSender` sends them.

    Attributes:
        parts: one call for each rank.
        newer_than: only a later generation than this one may get the parts; -1 for any.
        generation: the generation that got the parts, or is meant to get them at present.
        sent: the parts have left. Guarded by the lock of the peer table.
        over: one part has failed, and the others with it.
    """

    __slots__ = ("generation", "newer_than", "over", "parts", "sent")

    def __init__(self, parts: Sequence[PendingCall], newer_than: int = -1) -> None:
        self.parts, self.newer_than = parts, newer_than
        self.generation = -1
        self.sent = self.over = False
        for part in parts:
            part.cohort = self

    def ended(self) -> bool:
        """True if a part has ended already, so that the others must not begin."""
        return self.over or any(part.future is not None and part.future.done() for part in self.parts)

    def is_one_generation(self) -> bool:
        """True if all parts are meant for the same generation, and for one that may get them."""
        self.generation = self.parts[0].incarnation
        return self.generation > self.newer_than and all(part.incarnation == self.generation for part in self.parts)

    def qualify(self, error: BaseException) -> None:
        """If the cohort was sent, change ``executed`` from "no" to "maybe" in the error of a part whose rank is lost or
        of another generation: other ranks of the role may have begun the call."""
        if self.sent and isinstance(error, PeerLost | StaleIncarnation) and error.executed == "no":
            error.executed = "maybe"


class RankLoop:
    """The last call to each rank through the handles of one `RoleGroup`.

    A program may call the ranks of an elastic role one by one: ``[rank.call("update") for rank in group]``. Each of
    these calls may wait for its rank to come back. But ranks depend on each other: if the group restarts in the middle
    of such a loop, the later calls would run alone in the new generation and wait for the other ranks' next calls. So
    the handles of one group remember the calls of the current loop. A second call to a rank begins a new loop.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[str, PendingCall] = {}

    def add(self, call: PendingCall) -> None:
        if call.name in self._calls:
            self._calls = {}
        self._calls[call.name] = call

    def left_behind(self, call: PendingCall, generation: int) -> PendingCall | None:
        """Another call of the loop that went to an older generation and has no result; None if ``call`` may go to this
        generation."""
        now_ns = time.perf_counter_ns()
        for other in self._calls.values():
            if other is call or other.peer is None or other.incarnation >= generation:
                continue
            future = other.future
            if future is None:
                if now_ns - other.started_ns < LOOP_MEMORY_NS:
                    return other
            elif not future.done() or (not future.has_value and now_ns - future.resolved_ns < LOOP_MEMORY_NS):
                return other
        return None


def how_it_ended(info: MemberExit) -> str:
    """One line on how a member ended, with the last lines of its log below."""
    where = f" on {info.hostname}" if info.hostname else ""
    text = f"{info.role} rank {info.rank} (pid {info.pid}{where}) {info.describe()}"
    if info.last_log_lines:
        text += "; its last lines:\n" + "\n".join(f"    {line}" for line in info.last_log_lines)
    return text


class _Wheel:
    """Deadline entries by the interval in which they expire."""

    def __init__(self, width_s: float) -> None:
        self.width_s = width_s
        self.buckets: dict[int, dict[int, DeadlineEntry]] = {}
        self.done = int(clock.now() / width_s)

    def expired(self, now: float) -> list[DeadlineEntry]:
        last = int(now / self.width_s)
        found: list[DeadlineEntry] = []
        for number in range(self.done + 1, last + 1):
            bucket = self.buckets.pop(number, None)
            if bucket:
                found += bucket.values()
        self.done = max(self.done, last)
        return found


class Deadlines:
    """Calls ``expired(entry)`` on the loop for each entry that was not removed in time.

    ``expired`` is called at most two intervals late: 0.04 s for deadlines up to 10 s away (0.14 s for the first one
    after a pause), 2 s for later deadlines. One tick serves all entries. Time in which the process was suspended does
    not count.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lock: AbstractContextManager[Any],
        expired: Callable[[DeadlineEntry], None],
    ) -> None:
        self._loop, self._lock, self._expired = loop, lock, expired
        clock.begin(loop)
        self._fine, self._coarse = _Wheel(FINE_S), _Wheel(COARSE_S)
        self._timer = loop.call_later(_IDLE_TICK_S, self._tick)
        self._closed = False

    def add(self, entry: DeadlineEntry, timeout_s: float) -> None:
        """Add an entry; the calling thread must hold the lock."""
        wheel = self._fine if timeout_s <= _FINE_UP_TO_S else self._coarse
        # At least one interval ahead of the tick, so that no entry is added to a bucket that is being emptied.
        number = int(entry.deadline / wheel.width_s) + 1
        if number < wheel.done + 2:
            number = wheel.done + 2
        bucket = wheel.buckets.get(number)
        if bucket is None:
            bucket = wheel.buckets[number] = {}
        bucket[entry.call_id] = entry
        entry.bucket = bucket

    @staticmethod
    def remove(entry: DeadlineEntry) -> None:
        if entry.bucket is not None:
            entry.bucket.pop(entry.call_id, None)
            entry.bucket = None

    def close(self) -> None:
        if not self._closed:
            clock.end(self._loop)
        self._closed = True
        self._timer.cancel()

    def _tick(self) -> None:
        clock.beat()
        now = clock.now()
        with self._lock:
            entries = self._fine.expired(now) + self._coarse.expired(now)
        for entry in entries:
            self._expired(entry)
        if not self._closed:
            pause_s = FINE_S if self._fine.buckets else _IDLE_TICK_S
            self._timer = self._loop.call_later(pause_s, self._tick)
