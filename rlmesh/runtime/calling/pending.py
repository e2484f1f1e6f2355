"""Calls that have no answer yet, and the connections that they wait for. Plain records; `Calls` acts on them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future as PlainFuture
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from rlmesh.errors import CallError, CallTimeout, Executed, PeerLost
from rlmesh.runtime.calling.call_stats import CallGroup
from rlmesh.runtime.connections.address_book import MemberExit, split_name
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.deadlines import DeadlineEntry
from rlmesh.wire.envelope import ANY_INCARNATION, Flag, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.calls import Calls
    from rlmesh.runtime.calling.future_arguments import KeptResult, PassedArguments
    from rlmesh.runtime.calling.generations import Cohort
    from rlmesh.runtime.calling.rank_loops import Round
    from rlmesh.runtime.streams import StreamSource


class PendingCall:
    """One call to one peer, from ``call()`` to its answer."""

    # One is made per call: what most calls never change are defaults of the class.
    bucket: dict[int, DeadlineEntry] | None = None
    call_id = 0
    sent_bytes = 0
    flags = 0
    future: Future[Any] | None = None
    peer: Peer | None = None
    source: StreamSource | None = None
    """Where the items of a stream go."""
    passed: PassedArguments | None = None
    """Futures among the arguments, until they are there."""
    kept: Sequence[KeptResult] = ()
    """Results that producers must keep until this call is over."""
    cohort: Cohort | None = None
    """The call to several ranks of an elastic role that it is part of."""
    round: Round | None = None
    """The calls to single ranks that it may be one of a loop with."""
    wanted = ANY_INCARNATION
    """The incarnation that it is meant for, whatever the address book says."""
    look_until_ns = 0
    """Until when whoever waits for it may look for the answer itself."""

    def __init__(
        self, table: Calls, name: str, method: str, timeout_s: float, chain: tuple[str, ...], endpoint: str | None,
        incarnation: int, frames: Frames, queue: bool, group: CallGroup | None,
    ) -> None:  # fmt: skip
        self.table, self.name, self.method, self.timeout_s, self.chain = table, name, method, timeout_s, chain
        self.endpoint, self.incarnation, self.frames, self.queue = endpoint, incarnation, frames, queue
        self.group = group
        self.pinned = endpoint is not None
        """Meant for the process at one address, whoever takes its place."""
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
        return str(self.table.waiting(self))

    def cancel(self) -> None:
        self.table.cancel(self)

    def stay(self) -> None:
        self.table.keep(self)

    def want(self, *, blocks: bool = False) -> None:
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

    def woke(self, lag_ns: int, run_queue_ns: int) -> None:
        self.table.ended.add_wake(self.name.partition(":")[0], self.method, lag_ns, run_queue_ns)

    def done(self, times: tuple[int, int, int] | None, received_bytes: int = 0) -> None:
        """Note where its time went: executed, queued and run-queue ns of the member; None without answer."""
        now_ns = time.perf_counter_ns()
        if self.peer is not None:
            self.peer.answer_ns = now_ns - self.started_ns
        answered = times is not None
        executed_ns, queued_ns, run_queue_ns = times or (0, 0, 0)
        waited_ns = self.table.meter.recent_ns(now_ns) - self.run_queue_ns if answered else 0
        self.table.ended.add((
            self.name, self.method, self.call_id, self.started_ns, now_ns, answered, executed_ns, queued_ns,
            self.sent_bytes, received_bytes, waited_ns, run_queue_ns, self.group,
        ))  # fmt: skip

    def take_passed(self) -> BaseException | None:
        """Put passed values, or where they are, among the arguments; an error if one of them cannot be had."""
        passed, self.passed = self.passed, None
        assert passed is not None
        error = passed.error()
        if error is None:
            try:
                self.frames, self.kept = passed.payload()
            except Exception as unusable:
                error = unusable
        self.flags |= int(Flag.PASSED)
        if self.future is not None:
            self.future.on_settled(self._forget_kept)
        return error

    def _forget_kept(self, _: object) -> None:
        self.kept = ()

    def error(self, cls: type[CallError], text: str, executed: Executed) -> CallError:
        role, rank = split_name(self.name)
        return cls(text, role=role, rank=rank, method=self.method, call_id=self.call_id, executed=executed)

    def late(self, state: str, executed: Executed) -> CallError:
        """The error at its deadline."""
        text = (
            f"{self.name}.{self.method}() gave no answer within its deadline ({self.age_s():.2f} s): {state}. "
            "Raise it with group.options(timeout_s=…), or look at the member's log and stacks"
        )
        return self.error(CallTimeout, text, executed)

    def lost(self, reason: str, executed: Executed) -> PeerLost:
        """The error if whoever must answer is gone."""
        end = self.table.job_end()
        reason = end.why if end is not None else reason
        text = f"{self.name} cannot answer {self.method}(): {reason} [asked {self.describe()}]"
        error = self.error(PeerLost, text, executed)
        assert isinstance(error, PeerLost)
        error.reason = reason
        error.__cause__ = end.error if end is not None else None
        return error


def wait_about(answer: PlainFuture[Any], seconds: float) -> None:
    """Block until a call is over of which is known about how long it takes in all: sleep until shortly before, and look
    for the answer then (`busy_poll`), instead of being woken by the thread that reads it."""
    call = answer._origin if isinstance(answer, Future) else None
    if isinstance(call, PendingCall) and call.table.busy_poll is not None:
        poll = call.table.busy_poll
        try:
            # To wake up takes about as long as an answer may still be called quick.
            answer.exception(max(0.0, seconds - 2 * poll.limit_s - call.age_s()))
        except TimeoutError:
            poll.block(call, seconds)
    if not answer.done():
        wait([answer])


class Peer:
    """A connection to one endpoint and the calls that wait for it."""

    def __init__(self, endpoint: str, channel: Channel, window: int) -> None:
        self.endpoint, self.channel = endpoint, channel
        self.window = self.normal_window = window
        """How many calls may be on their way at once; more where the peer said so (`Room`)."""
        self.pending: dict[int, PendingCall] = {}
        self.waiting: deque[PendingCall] = deque()
        self.blocked: deque[Any] = deque()
        """Gates of the plain threads that wait for room."""
        self.queued_ns = 0
        """How long the call that it answered last had waited there."""
        self.answer_ns = 0
        """How long the call that ended last was on its way."""
        self.opening: clock.Timer | None = None
        self.ending = False
        """Its process closed the connection and was still there when somebody looked."""

    def begun(self) -> Executed:
        """Whether calls to it may have begun: none is sent before the greeting is over."""
        return "maybe" if self.channel.authenticated else "no"

    def load(self) -> tuple[int, int]:
        """Calls of this process that are on their way there, and how long the last one had queued (ns)."""
        return len(self.pending) + len(self.waiting), self.queued_ns


def how_it_ended(info: MemberExit) -> str:
    """How a member ended, in one line, with its last words below."""
    where = f" on {info.hostname}" if info.hostname else ""
    text = f"{info.role} rank {info.rank} (pid {info.pid}{where}) {info.describe()}"
    if info.last_log_lines:
        text += "; its last lines:\n" + "\n".join(f"    {line}" for line in info.last_log_lines)
    return text
