"""`IncomingCall`: a call in the process that serves it, with the `CallContext` of its method."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from rlmesh.errors import CallError, PeerLost, SlotGone
from rlmesh.runtime.calling.peer_status import Serving
from rlmesh.runtime.connections.address_book import split_name
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.served_objects import Method
from rlmesh.wire import codec
from rlmesh.wire.envelope import Call, Flag, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.future_arguments import ArgumentResolver
    from rlmesh.runtime.future import Future

_NO_REPLY = int(Flag.NO_REPLY)


class CallContext:
    """The call that the current thread or task is serving.

    Attributes:
        chain: serial slots held by this call and by the calls that led to it.
        deadline: the time, by `rlmesh.runtime.process.clock`, at which the caller gives up.
        over: the method has returned. Tasks and callbacks that it started still have this context, but no longer act on
            behalf of the call.
    """

    __slots__ = ("_children", "cancelled", "chain", "deadline", "over")

    def __init__(self, chain: tuple[str, ...], deadline: float) -> None:
        self.chain = chain
        self.deadline = deadline
        self._children: WeakSet[Future[Any]] | None = None
        self.cancelled = False
        self.over = False

    def add_child(self, future: Future[Any]) -> None:
        """Register a call that was made while serving this call."""
        if self._children is None:
            self._children = WeakSet()
        self._children.add(future)
        if self.cancelled:
            future.cancel()

    def remaining_s(self) -> float:
        return self.deadline - clock.now()

    def cancel(self) -> None:
        """Cancel all calls that were made on behalf of this call."""
        self.cancelled = True
        for child in list(self._children or ()):
            child.cancel()


current_call: ContextVar[CallContext | None] = ContextVar("rlmesh_current_call", default=None)


def served_call() -> CallContext | None:
    """The unanswered call on whose behalf the current thread or task acts; None if there is none."""
    context = current_call.get()
    return None if context is None or context.over else context


class ServedStream(Protocol):
    """The stream of a call that asked for one."""

    @property
    def waits(self) -> bool:
        """True while the producer waits for the consumer's credit."""
        ...

    def on_credit(self, count: int) -> None: ...

    def cancel(self) -> None: ...

    def run(self) -> None: ...

    async def run_async(self) -> None: ...


class IncomingCall:
    """A call from its arrival until its reply has left."""

    # One object is made per call, so attributes that most calls never change are defaults of the class.
    started_ns = 0
    exit: SystemExit | None = None
    cancelled = False
    task: asyncio.Task[Any] | None = None
    stream: ServedStream | None = None
    passed: ArgumentResolver | None = None
    keep = False
    refused = False
    runs_next = False
    """True if the coroutine that runs the call also runs the next call of its method."""
    next_call: IncomingCall | None = None

    def __init__(self, channel: Channel, call: Call, frames: Frames, method: Method, run_queue_ns: int) -> None:
        self.channel, self.call, self.frames, self.method = channel, call, frames, method
        self.run_queue_ns = run_queue_ns
        self.received_ns = self.ready_ns = time.perf_counter_ns()
        chain = (*call.chain, method.slot) if method.serial else call.chain
        self.context = CallContext(chain, clock.now() + call.timeout_s)
        self.key = (channel.link, call.call_id)

    @property
    def is_shown(self) -> bool:
        """False for a call that was cancelled before it began and waits for its turn to be dropped."""
        return not self.context.over and (self.started_ns > 0 or not self.cancelled)

    def status(self, now_ns: int) -> Serving:
        """The call's status for people; the time counts from the start of a call that runs, else from its arrival."""
        runs = self.started_ns > 0 and not (self.stream is not None and self.stream.waits)
        unawaited = ""
        if self.call.flags & _NO_REPLY:
            unawaited = "nobody waits for a notification"
        elif self.cancelled:
            unawaited = "its call was cancelled or timed out"
        since_ns = self.started_ns or self.received_ns
        method = f"{self.call.target}.{self.call.method}"
        return Serving(method, (now_ns - since_ns) / 1e9, self.channel.peer_name, runs, unawaited)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the arguments; may be called once."""
        call = self.call
        self.refused = True
        # The frames are dropped now: frames that cannot be decoded must not hold the sender's memory until later.
        frames, self.frames = self.frames, []
        try:
            if self.passed is None:
                args, kwargs = codec.decode(frames)
            else:
                args, kwargs = self.passed.decode(frames)
        except CallError:
            raise
        except SlotGone as error:
            role, rank = split_name(call.target)
            raise PeerLost(
                f"the arguments of {call.target}.{call.method}() cannot be read by {call.target}: {error}",
                role=role, rank=rank, method=call.method, executed="no",
            ) from error  # fmt: skip
        except BaseException as error:  # An argument's own code may raise anything; it must not end this process.
            role, rank = split_name(call.target)
            raise CallError(
                f"the arguments of {call.target}.{call.method}() cannot be decoded by {call.target}: "
                f"{type(error).__name__}: {error}. Is the same code importable there?",
                role=role, rank=rank, method=call.method, executed="no",
            ) from error  # fmt: skip
        self.passed = None
        self.refused = False
        return args, kwargs
