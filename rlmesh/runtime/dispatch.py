"""The callee's side: from an arrived call to the user's method and back to the reply.

Methods of the runtime's loop are marked *loop*; `_execute` runs on a thread of the member. User code and
network I/O never share a thread, unless an object was served ``inline`` (control objects, embedded services).
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rlmesh.errors import CallCancelled, CallError, MethodNotFound, StaleIncarnation, WouldDeadlock
from rlmesh.runtime.address import split_name
from rlmesh.runtime.channel import Channel
from rlmesh.runtime.context import CallContext, current_call
from rlmesh.runtime.executors import SerialExecutor
from rlmesh.runtime.future import Future
from rlmesh.runtime.rpc import exported_functions, mark_of
from rlmesh.runtime.sequence import FutureSequence
from rlmesh.runtime.timing import own_run_queue_since_last_ns
from rlmesh.wire import codec, failure
from rlmesh.wire.envelope import ANY_INCARNATION, Call, Flag, Frames, Reply

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What dispatch needs of its runtime."""

    def post(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run ``fn`` on the runtime's loop, from any thread."""
        ...

    def user_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs ``async def`` methods of members."""
        ...

    def system_exit(self, code: object) -> None:
        """User code called ``sys.exit``."""
        ...


class Method:
    """One exported method of one served object. ``slot`` is what a running call of it holds."""

    def __init__(self, owner: Served, name: str, function: Callable[..., Any]) -> None:
        mark = mark_of(function)
        self.owner, self.name, self.function = owner, name, function
        self.concurrent = mark.concurrent if mark is not None else 1
        self.is_async = inspect.iscoroutinefunction(function)
        self.serial = self.concurrent == 1
        # Serial `def` methods share the member's one thread, so they share a slot.
        self.slot = f"{owner.name}.{name}" if self.is_async else f"{owner.name}!{owner.incarnation}"
        self.running = 0
        self.queue: deque[Incoming] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.concurrent, f"rlmesh-{self.owner.name}-{self.name}")
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class Served:
    """An object under a name."""

    def __init__(
        self, name: str, incarnation: int, functions: Mapping[str, Callable[..., Any]], *, inline: bool
    ) -> None:
        self.name, self.incarnation, self.inline = name, incarnation, inline
        self.methods = {method: Method(self, method, function) for method, function in functions.items()}
        self.executor = SerialExecutor(name)
        self.free_since_ns = 0

    def find(self, name: str) -> Method:
        found = self.methods.get(name)
        if found is None and (function := exported_functions().get(name)) is not None:
            found = self.methods[name] = Method(self, name, function)
        if found is None:
            near = difflib.get_close_matches(name, self.methods, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(sorted(self.methods)) or "none"
            raise MethodNotFound(
                f"{self.name} exports no method {name!r} (it exports: {known}){hint} "
                "Mark the method with @rpc to let other members call it"
            )
        return found

    def close(self) -> None:
        for method in self.methods.values():
            method.close()
        self.executor.close()


class Incoming:
    """A call that arrived, until its reply left."""

    __slots__ = ("call", "cancelled", "channel", "context", "exit", "frames", "method", "ready_ns", "received_ns",
                 "run_queue_ns", "started_ns", "task")  # fmt: skip

    def __init__(self, channel: Channel, call: Call, frames: Frames, method: Method, run_queue_ns: int) -> None:
        self.channel, self.call, self.frames, self.method = channel, call, frames, method
        self.run_queue_ns = run_queue_ns
        self.received_ns = self.ready_ns = time.perf_counter_ns()
        self.started_ns = 0
        self.exit: SystemExit | None = None
        self.cancelled = False
        self.task: asyncio.Task[Any] | None = None
        chain = (*call.chain, method.slot) if method.serial else call.chain
        self.context = CallContext(chain, time.monotonic() + call.timeout_s)

    @property
    def key(self) -> tuple[Any, int]:
        return (self.channel.link, self.call.call_id)


class Dispatcher:
    """Serves objects of one runtime."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host, self._loop = host, loop
        self._served: dict[str, Served] = {}
        self._incoming: dict[tuple[Any, int], Incoming] = {}
        self._early: dict[str, list[tuple[Channel, Call, Frames, int]]] = {}

    def expect(self, name: str) -> None:
        """Keep calls to a name that is not served yet until it is."""
        if name not in self._served:
            self._early.setdefault(name, [])

    def serve(self, served: Served) -> None:
        """From any thread: calls that arrive from now on find it."""
        self._served[served.name] = served

    def release(self, name: str) -> None:
        """On the loop, after `serve`: calls that came early begin."""
        for early in self._early.pop(name, ()):
            self.on_call(*early)

    def unserve(self, name: str) -> Served | None:
        return self._served.pop(name, None)

    def served(self) -> tuple[Served, ...]:
        return tuple(self._served.values())

    # Loop.

    def on_call(self, channel: Channel, call: Call, frames: Frames, run_queue_ns: int) -> None:
        if call.target in self._early:
            self._early[call.target].append((channel, call, frames, run_queue_ns))
            return
        try:
            method = self._find(call)
        except Exception as error:
            self._refuse(channel, call, error)
            return
        incoming = Incoming(channel, call, frames, method, run_queue_ns)
        if not call.flags & Flag.NO_REPLY:
            self._incoming[incoming.key] = incoming
        if not method.is_async and method.serial:
            method.owner.executor.submit(lambda: self._execute(incoming))
        elif method.running >= method.concurrent:
            method.queue.append(incoming)
        else:
            self._begin(incoming)

    def on_cancel(self, channel: Channel, call_id: int) -> None:
        for name, calls in self._early.items():
            self._early[name] = [c for c in calls if (c[0].link, c[1].call_id) != (channel.link, call_id)]
        incoming = self._incoming.pop((channel.link, call_id), None)
        if incoming is None:
            return
        incoming.cancelled = True
        incoming.context.cancel()
        if incoming.task is not None:
            incoming.task.get_loop().call_soon_threadsafe(incoming.task.cancel)
        elif incoming in incoming.method.queue:
            incoming.method.queue.remove(incoming)

    def _find(self, call: Call) -> Method:
        served = self._served.get(call.target)
        if served is None:
            known = ", ".join(self._served) or "nothing"
            raise MethodNotFound(f"this process does not serve {call.target!r}; it serves {known}")
        role, rank = split_name(served.name)
        if call.incarnation not in (ANY_INCARNATION, served.incarnation):
            raise StaleIncarnation(
                f"{call.target}.{call.method}() was meant for incarnation {call.incarnation}; "
                f"this is incarnation {served.incarnation}", role=role, rank=rank, method=call.method, executed="no",
            )  # fmt: skip
        method = served.find(call.method)
        if method.serial and method.slot in call.chain:
            raise WouldDeadlock(
                f"{call.target}.{call.method}() was called on behalf of a method that it would have to wait for "
                f"(held: {', '.join(call.chain)}). Return the value instead of calling back, or make the method "
                "`async def` or @rpc(concurrent=n)"
            )
        return method

    def _begin(self, incoming: Incoming) -> None:
        method = incoming.method
        method.running += 1
        incoming.ready_ns = time.perf_counter_ns()
        if not method.is_async:
            method.pool().submit(self._execute, incoming)
        elif method.owner.inline:
            incoming.task = self._loop.create_task(self._run_async(incoming))
        else:
            self._host.user_loop().call_soon_threadsafe(self._begin_on_user_loop, incoming)

    def _ended(self, incoming: Incoming, ok: bool, frames: Frames, ended_ns: int) -> None:
        self._incoming.pop(incoming.key, None)
        method = incoming.method
        if method.is_async or not method.serial:
            method.running -= 1
            if method.queue and method.running < method.concurrent:
                self._begin(method.queue.popleft())
        if incoming.cancelled or incoming.call.flags & Flag.NO_REPLY:
            return
        queued = incoming.ready_ns - incoming.received_ns
        reply = Reply(incoming.call.call_id, ok, ended_ns - incoming.started_ns, queued, incoming.run_queue_ns)
        incoming.channel.send(reply, frames)

    def _refuse(self, channel: Channel, call: Call, error: Exception) -> None:
        if call.flags & Flag.NO_REPLY:
            logger.warning("a notification was refused: %s", error)
            return
        frames = codec.encode(failure.record(error, executed="no"))
        channel.send(Reply(call.call_id, False, 0, 0, 0), frames)

    # The user's loop.

    def _begin_on_user_loop(self, incoming: Incoming) -> None:
        incoming.task = asyncio.get_running_loop().create_task(self._run_async(incoming))
        if incoming.cancelled:
            incoming.task.cancel()

    async def _run_async(self, incoming: Incoming) -> None:
        incoming.run_queue_ns += own_run_queue_since_last_ns()
        incoming.started_ns = time.perf_counter_ns()
        current_call.set(incoming.context)
        try:
            args, kwargs = _arguments(incoming)
            value = await incoming.method.function(*args, **kwargs)
            ok, frames = True, codec.encode(value)
        except BaseException as error:
            ok, frames = False, self._failed(incoming, error)
        ended_ns = time.perf_counter_ns()
        own_run_queue_since_last_ns()
        self._finish(incoming, ok, frames, ended_ns)

    # The member's thread.

    def _execute(self, incoming: Incoming) -> None:
        served = incoming.method.owner
        if incoming.cancelled:
            self._host.post(self._ended, incoming, False, [], time.perf_counter_ns())
            return
        incoming.run_queue_ns += own_run_queue_since_last_ns()
        incoming.started_ns = time.perf_counter_ns()
        # Time behind other methods is theirs; time between the slot's release and this line is rlmesh's.
        incoming.ready_ns = max(incoming.ready_ns, served.free_since_ns)
        token = current_call.set(incoming.context)
        try:
            args, kwargs = _arguments(incoming)
            value = incoming.method.function(*args, **kwargs)
            if isinstance(value, Future | FutureSequence):
                value = value.result()
            ok, frames = True, codec.encode(value)
        except BaseException as error:
            ok, frames = False, self._failed(incoming, error)
        finally:
            current_call.reset(token)
        ended_ns = time.perf_counter_ns()
        if incoming.method.serial:
            served.free_since_ns = ended_ns
        own_run_queue_since_last_ns()
        self._finish(incoming, ok, frames, ended_ns)

    def _finish(self, incoming: Incoming, ok: bool, frames: Frames, ended_ns: int) -> None:
        incoming.context.over = True
        self._host.post(self._ended, incoming, ok, frames, ended_ns)
        if incoming.exit is not None:
            # After the reply: the caller shall learn that the method called sys.exit, not only that it died.
            self._host.system_exit(incoming.exit.code)

    def _failed(self, incoming: Incoming, error: BaseException) -> Frames:
        call = incoming.call
        if isinstance(error, asyncio.CancelledError) and incoming.cancelled:
            error = CallCancelled(f"{call.target}.{call.method}() was cancelled", method=call.method)
        record = failure.record(error)
        if call.flags & Flag.NO_REPLY:
            logger.error("notification %s.%s() failed:\n%s", call.target, call.method, record.traceback)
        if isinstance(error, SystemExit):
            incoming.exit = error
        return codec.encode(record)


def _arguments(incoming: Incoming) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = incoming.call
    try:
        args, kwargs = codec.decode(incoming.frames)
    except Exception as error:
        role, rank = split_name(call.target)
        raise CallError(
            f"the arguments of {call.target}.{call.method}() cannot be decoded by {call.target}: "
            f"{type(error).__name__}: {error}. Is the same code importable there?",
            role=role, rank=rank, method=call.method, executed="no",
        ) from error  # fmt: skip
    incoming.frames = []
    return args, kwargs
