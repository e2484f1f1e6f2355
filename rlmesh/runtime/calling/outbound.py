"""How calls leave a process: arguments are captured, then a call is made of them and sent, or kept until it can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

from rlmesh.errors import Unserializable, UsageError
from rlmesh.runtime.calling.call_stats import CallGroup, CallStats, EdgeStats, EndedCall
from rlmesh.runtime.calling.group_calls import GroupSubmission
from rlmesh.runtime.calling.peer_status import Serving, Waiting
from rlmesh.runtime.calling.pending import PendingCall
from rlmesh.runtime.calling.retry import Retries
from rlmesh.runtime.connections.address_book import AddressBook
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.future import Future
from rlmesh.runtime.handle import CallOptions, MemberHandle
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.call_context import CallContext, served_call
from rlmesh.runtime.serving.result_store import FETCH
from rlmesh.wire import codec
from rlmesh.wire.envelope import ANY_INCARNATION, WINDOW_SHIFT, Buffer, Flag, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.calls import Calls
    from rlmesh.runtime.calling.future_arguments import PassedArguments
    from rlmesh.runtime.connections.shm_transfer import ShmTransfer
    from rlmesh.runtime.serving.dispatch import Dispatcher
    from rlmesh.runtime.streams import Inbox, Stream
    from rlmesh.wire.passed import RemoteRef

_ANSWERS_POLL_S = 0.005


class Submission(GroupSubmission):
    """The caller's half of a `Runtime`."""

    name: str
    endpoint: str | None
    public_endpoint: str | None
    default_timeout_s: float
    post: Callable[..., None]
    network: NetworkOptions
    _later: Callable[[float, Callable[[], None]], object]
    _calls: Calls
    _dispatcher: Dispatcher
    _shm: ShmTransfer

    def peer(self, name: str, endpoint: str, *, incarnation: int | None = None) -> MemberHandle:
        """A handle to an object that another process serves, by its address."""
        number = ANY_INCARNATION if incarnation is None else incarnation
        return MemberHandle(self, name, endpoint=endpoint, incarnation=number)

    def submit(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
    ) -> Future[Any]:  # fmt: skip
        """Send one call. Its arguments are captured before this returns."""
        return self.submit_encoded(
            name, method, self._encode(method, (args, kwargs), keep=reply), options, endpoint, incarnation, reply
        )

    def encode_calls(
        self, method: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Frames | PassedArguments]:
        """Frames per member; members that get the same arguments share them, encoded once."""
        encoded: dict[int, Frames | PassedArguments] = {}
        for call in calls:
            if id(call) not in encoded:
                encoded[id(call)] = self._encode(method, call)
        return [encoded[id(call)] for call in calls]

    def _encode(
        self, method: str, call: tuple[tuple[Any, ...], dict[str, Any]], *, keep: bool = True
    ) -> Frames | PassedArguments:
        """Capture arguments; those that hold futures go out when all of them have ended."""
        try:
            return codec.encode(call, self.capture)
        except codec.Deferred:
            from rlmesh.runtime.calling.future_arguments import PassedArguments

            passed = PassedArguments(call, self.capture)
            passed.gather(keep=keep)
            return passed
        except Unserializable as error:
            raise _naming_the_argument(method, call, error) from error.__cause__

    def submit_encoded(
        self, name: str, method: str, frames: Frames | PassedArguments, options: CallOptions,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
        group: CallGroup | None = None, inbox: Inbox | None = None,
    ) -> Future[Any]:  # fmt: skip
        context = served_call()
        timeout_s = float(self.default_timeout_s if options.timeout_s is None else options.timeout_s)
        chain: tuple[str, ...] = ()
        if context is not None:
            chain = context.chain
            timeout_s = max(0.0, min(timeout_s, context.remaining_s()))
        if options.idempotent and reply and inbox is None:
            return self._retried(name, method, frames, timeout_s, chain, endpoint, incarnation, options.queue, context)
        passed = None if isinstance(frames, list) else frames
        captured = frames if isinstance(frames, list) else []
        call = PendingCall(
            self._calls, name, method, timeout_s, chain, endpoint, incarnation, captured, options.queue, group
        )
        if options.round is not None:
            call.round = options.round
            call.round.add(call)
        future: Future[Any] = Future(call)
        if reply:
            call.future = future
            if context is not None:
                context.add_child(future)
            if inbox is not None:
                call.flags = Flag.STREAM | inbox.window << WINDOW_SHIFT
                call.source = inbox.add(call)
        else:
            call.flags = int(Flag.NO_REPLY)
        if passed is None:
            self._calls.start(call)
        else:
            call.passed = passed
            self._calls.start_later(call)
        return future

    def fetch(self, elsewhere: RemoteRef, timeout_s: float | None) -> Future[Any]:
        """A result that a process keeps; on behalf of no particular call."""
        if elsewhere.endpoint in (self.endpoint, self.public_endpoint):
            future: Future[Any] = Future()
            try:
                future.end(self._dispatcher.results.value(elsewhere, self.capture), None)
            except Exception as error:
                future.end(None, error)
            return future
        # The caller, perhaps on another node, named the producer by the address that it uses itself.
        member = self._calls.book.find_name(elsewhere.name) if self._calls.book is not None else None
        if member is not None and member.endpoint and member.incarnation == elsewhere.incarnation:
            elsewhere = elsewhere._replace(endpoint=member.endpoint)
        limit_s = self.default_timeout_s if timeout_s is None else timeout_s
        frames = codec.encode(((elsewhere.token, *elsewhere.part), {}))
        return self._launch(
            elsewhere.name, FETCH, frames, float(limit_s), (), elsewhere.endpoint, elsewhere.incarnation, True
        )

    def _launch(
        self, name: str, method: str, frames: Frames | PassedArguments, timeout_s: float, chain: tuple[str, ...],
        endpoint: str | None, incarnation: int, queue: bool,
    ) -> Future[Any]:  # fmt: skip
        """A call on behalf of no particular call, from any thread."""
        captured = frames if isinstance(frames, list) else []
        call = PendingCall(self._calls, name, method, timeout_s, chain, endpoint, incarnation, captured, queue, None)
        future: Future[Any] = Future(call)
        call.future = future
        if isinstance(frames, list):
            self._calls.start(call)
        else:
            call.passed = frames
            self._calls.start_later(call)
        return future

    def _retried(
        self, name: str, method: str, frames: Frames | PassedArguments, timeout_s: float, chain: tuple[str, ...],
        endpoint: str | None, incarnation: int, queue: bool, context: CallContext | None,
    ) -> Future[Any]:  # fmt: skip
        """A call that is made again where `pause_before_retry` allows it."""
        retries = Retries(
            lambda left_s: self._launch(name, method, frames, left_s, chain, endpoint, incarnation, queue),
            lambda pause_s, fn: self.post(self._later, pause_s, fn),
            lambda: self._calls.is_gone(name, endpoint),
            timeout_s,
        )
        if context is not None:
            context.add_child(retries.future)
        return retries.start()

    def stream(
        self, targets: Sequence[tuple[str, str | None, int]], method: str, args: tuple[Any, ...],
        kwargs: dict[str, Any], options: CallOptions,
    ) -> Stream[Any]:  # fmt: skip
        """Ask members, each by name, endpoint (or None) and incarnation, for the items of a generator method."""
        from rlmesh.runtime.streams import Inbox, Stream

        frames = self._encode(method, (args, kwargs))
        inbox = Inbox(options.window)
        for name, endpoint, incarnation in targets:
            self.submit_encoded(name, method, frames, options, endpoint, incarnation, inbox=inbox)
        return Stream(inbox, self.post)

    def capture(self, buffers: Sequence[memoryview], rest_bytes: int = 0) -> Sequence[Buffer]:
        """Frames of large buffers that no longer change: in shared memory where there is room.

        Raises:
            PayloadTooLarge: they and the rest of their message are above the cap.
        """
        self.network.check_payload(sum(buffer.nbytes for buffer in buffers) + rest_bytes)
        return self._shm.capture(buffers) if buffers else ()

    def least_busy(self, names: Sequence[str]) -> str:
        """Which of these members has the fewest calls of this process on their way, and the shortest queue."""
        return self._calls.least_busy(names)

    def take_edges(self) -> tuple[EdgeStats, ...]:
        """Whom this process called since the last take, summed by member and method."""
        return self._calls.ended.take_edges()

    def trace_calls(self, trace: Callable[[Sequence[EndedCall]], None]) -> None:
        """Give single calls to ``trace``, some time after they ended; from any thread."""
        self._calls.ended.trace = trace

    def take_call_stats(self) -> tuple[CallStats, ...]:
        """Where the time of this process's calls went since this was called before."""
        return self._calls.ended.take_stats()

    def await_answers(self, timeout_s: float) -> None:
        """Wait until no call of this process to a member is on its way, but no longer than that."""
        end = clock.now() + timeout_s
        while clock.now() < end and any(c.future and not c.name.startswith("@") for c in self._calls.pending()):
            time.sleep(_ANSWERS_POLL_S)
        taken_in = Event()
        self.post(taken_in.set)  # Behind the answer that the loop may just be reading.
        taken_in.wait(max(0.0, end - clock.now()))

    def pending(self) -> list[str]:
        """Whom this process waits for: one line per call."""
        return [call.describe() for call in self._calls.pending()]

    def waiting(self) -> tuple[Waiting, ...]:
        """Whom this process waits for, with what is known of whoever must answer; those that wait longest first."""
        calls = sorted(self._calls.pending(), key=lambda call: call.started_ns)
        return tuple(self._calls.waiting(call) for call in calls)

    def note_activity(self) -> None:
        """A sign of life of this process. From any thread."""
        self._calls.active_at = clock.now()

    def notify_aside(self, peer: MemberHandle, method: str, *args: object) -> None:
        """Notify without a sign of life: what the process says about itself must not keep it from being quiet."""
        active_at, began_at = self._calls.active_at, clock.now()
        peer.notify(method, *args)
        if began_at <= self._calls.active_at <= clock.now():
            self._calls.active_at = active_at

    def quiet_s(self) -> float:
        """Seconds since this process sent a call, got an answer, sent an item of a stream, or gave another sign of
        life. Calls that it serves are none."""
        return max(0.0, clock.now() - max(self._calls.active_at, self._dispatcher.active_at))

    def serving(self) -> tuple[Serving, ...]:
        """What this process was asked and has not ended, whether somebody waits for it or not."""
        now_ns = time.perf_counter_ns()
        return tuple(incoming.status(now_ns) for incoming in self._dispatcher.calls() if incoming.is_shown)

    def running_on(self, for_s: float) -> tuple[Serving, ...]:
        """What has been running here for so many seconds although its call was cancelled or timed out."""
        now_ns = time.perf_counter_ns()
        calls = (incoming.status(now_ns) for incoming in self._dispatcher.unawaited() if incoming.cancelled)
        return tuple(call for call in calls if call.runs and call.since_s >= for_s)

    def read_last_lines(self, read: Callable[[str, int], str]) -> None:
        """Let ``read`` give the last line of a member's log, by role and rank, for messages about members that one
        waits for."""
        self._calls.last_line_of = read

    def address_book(self) -> AddressBook:
        book = self._calls.book
        if book is None:
            raise UsageError(
                f"{self.name} does not know the job's members yet: roles can be called from run(), from methods, and "
                "from setup() once all members are up"
            )
        return book


def _as_it_is(buffers: Sequence[memoryview], rest_bytes: int = 0) -> Sequence[Buffer]:
    """For values that are encoded only to see whether that works."""
    return buffers


def _naming_the_argument(
    method: str, call: tuple[tuple[Any, ...], dict[str, Any]], error: Unserializable
) -> Unserializable:
    """The same error, for whoever wrote the call."""
    from rlmesh.runtime.batch_split import named_arguments

    for name, value in named_arguments(*call):
        try:
            codec.encode(value, _as_it_is)
        except Unserializable as own:
            return Unserializable(f"{name} of {method}(): {own}")
    return error
