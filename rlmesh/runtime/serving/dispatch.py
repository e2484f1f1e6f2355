"""The callee's side of a call: from its arrival to the user's method and back to the reply.

Comments mark the methods that run on the runtime's loop; `_execute` runs on a thread of the member. User code and
network I/O never share a thread, unless an object was served ``inline`` (control objects, embedded services).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any

from rlmesh.errors import (
    CallCancelled,
    MalformedFrame,
    MethodNotFound,
    StaleIncarnation,
    WouldDeadlock,
)
from rlmesh.runtime.calling.call_stats import own_run_queue_since_last_ns
from rlmesh.runtime.connections.address_book import split_name
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.forked import end_child
from rlmesh.runtime.sequence import FutureSequence
from rlmesh.runtime.serving.activity_board import DEF, Board
from rlmesh.runtime.serving.coroutines import InContext, await_elsewhere, cancel_task
from rlmesh.runtime.serving.incoming import IncomingCall, current_call
from rlmesh.runtime.serving.reply_backlog import LARGE_BYTES, LIMIT_BYTES
from rlmesh.runtime.serving.result_store import FETCH, KEEP_BYTES, ResultStore
from rlmesh.runtime.serving.served_objects import Method, Served
from rlmesh.runtime.serving.serving_host import ServingHost
from rlmesh.wire import codec, failure
from rlmesh.wire.envelope import (
    ANY_INCARNATION,
    WINDOW_SHIFT,
    Call,
    Concurrency,
    Credit,
    Flag,
    Frames,
    Reply,
    StoredReply,
)
from rlmesh.wire.passed import ItemRange, unpack_passed

logger = logging.getLogger(__name__)

_CALLS_PER_TURN = 64
"""Short calls of one method that run before the loop's other tasks have their turn."""

_NO_REPLY, _STREAM, _PASSED, _KEEP = int(Flag.NO_REPLY), int(Flag.STREAM), int(Flag.PASSED), int(Flag.KEEP)


class Dispatcher:
    """Serves the objects of a runtime."""

    def __init__(self, host: ServingHost, loop: asyncio.AbstractEventLoop) -> None:
        self._host, self._loop = host, loop
        self.capture = host.capture
        self._served: dict[str, Served] = {}
        self._incoming: dict[tuple[Any, int], IncomingCall] = {}
        self._unawaited: dict[tuple[Any, int], IncomingCall] = {}
        """Notifications, and calls that still run although they were cancelled."""
        self._early: dict[str, list[tuple[Channel, Call, Frames, int]]] = {}
        self.starting: list[IncomingCall] | None = None
        """The calls that `start_deferred` starts; None while calls start at once."""
        self.results = ResultStore(loop)
        self.board: Board | None = None
        """Records which methods begin, for processes that inspect this one from outside."""
        self.active_at = clock.now()
        """The time when an item of a stream was last sent."""
        self.ending = False
        """True while the process ends: calls that are cancelled now were not cancelled by their callers."""
        self.forked = False
        """True in a forked child, which must not answer callers."""

    def expect(self, name: str) -> None:
        """Queue calls to a name until it is served."""
        if name not in self._served:
            self._early.setdefault(name, [])

    def order_of(self, call: Call) -> str | None:
        """The slot that a call waits for; calls of one caller for one slot start in the order they were made."""
        served = self._served.get(call.target)
        method = served.methods.get(call.method) if served is not None else None
        if method is None:
            return call.target  # The call will be refused, or waits until its member is served.
        return method.slot if method.serial else None

    def serve(self, served: Served) -> None:
        """Serve an object to calls that arrive from now on. Thread-safe."""
        self._served[served.name] = served

    def release(self, name: str) -> None:
        """Begin the calls that arrived before `serve`. Runs on the loop."""
        for early in self._early.pop(name, ()):
            self.on_call(*early)

    def unserve(self, name: str) -> Served | None:
        return self._served.pop(name, None)

    def served(self) -> tuple[Served, ...]:
        return tuple(self._served.values())

    # On the runtime's loop.

    def on_call(self, channel: Channel, call: Call, frames: Frames, run_queue_ns: int) -> None:
        if self._early and call.target in self._early:
            self._early[call.target].append((channel, call, frames, run_queue_ns))
            return
        try:
            method = self._find(call)
        except Exception as error:
            if call.method == FETCH and not isinstance(error, StaleIncarnation):
                self._answer_fetch(channel, call, frames)
            else:
                self.refuse(channel, call, error)
            return
        incoming = IncomingCall(channel, call, frames, method, run_queue_ns)
        if not call.flags:
            self._incoming[incoming.key] = incoming
        elif not self._prepare(incoming):
            return
        if self.starting is None:
            self.start(incoming)
        else:
            self.starting.append(incoming)

    def defer_starts(self) -> None:
        """Start calls that arrive from now on at `start_deferred`.

        A thread that is woken while this thread holds the interpreter's lock would only go to sleep again.
        """
        if self.starting is None:
            self.starting = []

    def start_deferred(self) -> None:
        starting, self.starting = self.starting, None
        for incoming in starting or ():
            self.start(incoming)

    def start(self, incoming: IncomingCall) -> None:
        """Begin a call as soon as its method has a free place."""
        method = incoming.method
        if not method.is_async and method.serial:
            run = partial(self._execute, incoming) if incoming.stream is None else incoming.stream.run
            method.owner.executor.submit(run, main=method.main_thread)
        elif self._may_begin(incoming):
            self.begin(incoming)

    def _prepare(self, incoming: IncomingCall) -> bool:
        """Apply the flags of a call; False if the call was refused."""
        call = incoming.call
        if call.flags & _STREAM and incoming.key in self._incoming:
            return False  # A duplicated packet: of two generators one would wait for ever.
        if call.flags & _PASSED:
            try:
                incoming.frames, values = unpack_passed(incoming.frames)
            except MalformedFrame as error:
                self.refuse(incoming.channel, call, error)
                return False
            from rlmesh.runtime.calling.future_arguments import ArgumentResolver

            incoming.passed = ArgumentResolver(values, call.timeout_s, self._host.fetch)
        (self._unawaited if call.flags & _NO_REPLY else self._incoming)[incoming.key] = incoming
        if call.flags & _STREAM:
            from rlmesh.runtime.serving.stream_server import StreamServer

            incoming.stream = StreamServer(self, incoming, max(1, call.flags >> WINDOW_SHIFT))
        elif call.flags & _KEEP:
            self.on_keep(incoming.channel, call.call_id)
        return True

    def on_keep(self, channel: Channel, call_id: int) -> None:
        incoming = self._incoming.get((channel.link, call_id))
        if incoming is not None:
            incoming.keep = True
            self.results.expect()

    def _answer_fetch(self, channel: Channel, call: Call, frames: Frames) -> None:
        try:
            ((token, *part), _) = codec.decode(frames)
            answer = self.results.fetch(token, ItemRange(*part), self._host.capture)
        except Exception as error:
            self.refuse(channel, call, error)
        else:
            channel.backlog.sent(answer)
            channel.send(Reply(call.call_id, True, 0, 0, 0), answer)

    def on_credit(self, channel: Channel, credit: Credit) -> None:
        incoming = self._incoming.get((channel.link, credit.call_id))
        if incoming is not None and incoming.stream is not None:
            incoming.stream.on_credit(credit.items)

    def calls(self) -> list[IncomingCall]:
        """Calls that have arrived and have not ended, also those without a waiting caller. Thread-safe."""
        return [*list(self._incoming.values()), *self.unawaited()]

    def unawaited(self) -> list[IncomingCall]:
        """Calls for whose answer no caller waits. Thread-safe."""
        return list(self._unawaited.values())

    def early(self) -> list[tuple[Channel, Call]]:
        """Calls to names that are not served yet. Thread-safe."""
        return [(channel, call) for calls in list(self._early.values()) for channel, call, _, _ in list(calls)]

    def on_lost(self, channel: Channel) -> None:
        """Cancel the calls of a caller that is gone or whose connection is lost, and drop its results."""
        self.results.drop_owner(channel.link)
        for link, call_id in list(self._incoming):
            if link is channel.link:
                self.on_cancel(channel, call_id)

    def on_cancel(self, channel: Channel, call_id: int) -> None:
        for name, calls in self._early.items():
            self._early[name] = [c for c in calls if (c[0].link, c[1].call_id) != (channel.link, call_id)]
        incoming = self._incoming.pop((channel.link, call_id), None)
        if incoming is None:
            return
        # Added before the cancellation, so that the thread that ends the call sees it and removes it again.
        self._unawaited[incoming.key] = incoming
        incoming.cancelled = True
        incoming.context.cancel()
        if incoming.stream is not None:
            incoming.stream.cancel()
        if incoming.passed is not None:
            incoming.passed.cancel()
        if incoming.task is not None:
            incoming.task.get_loop().call_soon_threadsafe(cancel_task, incoming)
        else:
            with incoming.method.lock:
                if incoming in incoming.method.queue:
                    incoming.method.queue.remove(incoming)
                    incoming.context.over = True
        if incoming.context.over:
            self._unawaited.pop(incoming.key, None)

    def _find(self, call: Call) -> Method:
        served = self._served.get(call.target)
        if served is None:
            known = ", ".join(self._served) or "nothing"
            raise MethodNotFound(f"this process does not serve {call.target!r}; it serves {known}")
        if call.incarnation not in (ANY_INCARNATION, served.incarnation):
            role, rank = split_name(served.name)
            raise StaleIncarnation(
                f"{call.target}.{call.method}() was meant for incarnation {call.incarnation}; "
                f"this is incarnation {served.incarnation}", role=role, rank=rank, method=call.method, executed="no",
            )  # fmt: skip
        method = served.methods.get(call.method) or served.find(call.method)
        if method.serial and method.slot in call.chain:
            raise WouldDeadlock(
                f"{call.target}.{call.method}() was called on behalf of a method that it would have to wait for "
                f"(held: {', '.join(call.chain)}). Return the value instead of calling back, or make the method "
                "`async def` or @rpc(concurrent=n)"
            )
        return method

    def begin(self, incoming: IncomingCall) -> None:
        """Run a call that has a place, or a stream that has new credit. Thread-safe."""
        method = incoming.method
        if not method.is_async:
            run = partial(self._execute, incoming) if incoming.stream is None else incoming.stream.run
            if method.pool is not None:
                method.pool.submit(run)
            else:
                method.owner.executor.submit(run, main=method.main_thread)
        elif method.owner.inline:
            incoming.task = self._loop.create_task(self._coroutine(incoming))
        else:
            self._host.post_to_user(self._begin_on_user_loop, incoming)

    def _may_begin(self, incoming: IncomingCall) -> bool:
        """Take one of the method's places; else queue the call and return False."""
        method = incoming.method
        with method.lock:
            if method.running >= method.concurrent:
                method.queue.append(incoming)
                return False
            method.running += 1
        if method.concurrent > incoming.channel.announced_calls:
            incoming.channel.announced_calls = method.concurrent
            incoming.channel.send(Concurrency(method.concurrent), [])
        return True

    # On any thread: a reply leaves from the thread that made it.

    def _ended(self, incoming: IncomingCall, ok: bool, frames: Frames, ended_ns: int) -> None:
        self._incoming.pop(incoming.key, None)
        method, call = incoming.method, incoming.call
        if method.is_async or not method.serial:
            self._free_place(incoming, ended_ns)
        if incoming.cancelled or call.flags & _NO_REPLY:
            self._unawaited.pop(incoming.key, None)
            return
        queued = incoming.ready_ns - incoming.received_ns
        if incoming.keep and ok and (nbytes := codec.size_bytes(frames)) >= KEEP_BYTES:
            self._store(incoming, frames, nbytes, ended_ns - incoming.started_ns, queued)
            return
        if len(frames) != 1 or len(frames[0]) >= LARGE_BYTES:  # Others are not counted.
            incoming.channel.backlog.sent(frames)
        fields = (call.call_id, ok, ended_ns - incoming.started_ns, queued, incoming.run_queue_ns)
        incoming.channel.put(tuple.__new__(Reply, fields), frames)  # takes half the time of Reply(…)
        if self._incoming:
            incoming.channel.kick()
        else:
            incoming.channel.hurry()  # No other reply of this turn can travel with it.

    def _free_place(self, incoming: IncomingCall, now_ns: int) -> None:
        method = incoming.method
        next_call: IncomingCall | None = None
        with method.lock:
            if method.queue:
                next_call = method.queue.popleft()
            else:
                method.running -= 1
        if next_call is not None:
            next_call.ready_ns = now_ns
            if incoming.runs_next:
                incoming.next_call = next_call
            else:
                self.begin(next_call)

    def _store(self, incoming: IncomingCall, frames: Frames, nbytes: int, executed_ns: int, queued_ns: int) -> None:
        call = incoming.call
        what = f"{call.target}.{call.method}()"
        token = self.results.add(incoming.channel.link, frames, what, call.timeout_s)
        reply = StoredReply(call.call_id, token, nbytes, executed_ns, queued_ns, incoming.run_queue_ns)
        incoming.channel.send(reply, [])

    def refuse(self, channel: Channel, call: Call, error: Exception) -> None:
        if call.flags & _NO_REPLY:
            logger.warning("a notification was refused: %s", error)
            return
        frames = codec.encode(failure.record(error, executed="no"))
        channel.send(Reply(call.call_id, False, 0, 0, 0), frames)

    # On the loop of the user's coroutines.

    def _begin_on_user_loop(self, incoming: IncomingCall) -> None:
        incoming.task = asyncio.get_running_loop().create_task(self._coroutine(incoming))

    def _coroutine(self, incoming: IncomingCall) -> Coroutine[Any, Any, None]:
        if incoming.stream is None and incoming.method.serial:
            return self._run_serially(incoming)
        return self._run_alone(incoming)

    async def _run_alone(self, incoming: IncomingCall) -> None:
        """Run a stream, or a call of a method that may run several times at once."""
        run = self._run_async(incoming) if incoming.stream is None else incoming.stream.run_async()
        await InContext(run, copy_context(), self.board, incoming.method)

    async def _run_serially(self, first: IncomingCall) -> None:
        """Run a call of a serial method, and the calls that queue behind it, in one task.

        A task and a turn of the loop per call would cost more than most calls. Each call has its own context, as it
        would have in its own task.
        """
        task = asyncio.current_task()
        assert task is not None
        context = copy_context()
        incoming: IncomingCall | None = first
        for number in itertools.count(1):
            if incoming is None or self.ending:
                return
            if incoming.stream is not None:
                self.begin(incoming)
                return
            incoming.task = task
            incoming.runs_next = True
            await InContext(self._run_async(incoming), context.copy(), self.board, incoming.method)
            while task.cancelling():
                task.uncancel()  # That call was cancelled, not the calls behind it.
            incoming.next_call, incoming = None, incoming.next_call
            if number % _CALLS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _set_aside(self, incoming: IncomingCall) -> bool:
        """Set a call aside until its caller has received its replies; False if the caller is not behind."""
        if not incoming.channel.backlog.set_aside(incoming):
            return False
        self._loop.call_soon_threadsafe(self._host.watch_backlog, incoming.channel)
        if incoming.method.is_async or not incoming.method.serial:
            incoming.task = None
            self._free_place(incoming, time.perf_counter_ns())
            incoming.runs_next = False
        return True

    async def _run_async(self, incoming: IncomingCall) -> None:
        backlog = incoming.channel.backlog
        if backlog.unreceived_bytes >= LIMIT_BYTES and not incoming.cancelled and self._set_aside(incoming):
            return
        if incoming.cancelled:
            self._ended(incoming, False, [], time.perf_counter_ns())
            return
        incoming.started_ns = began_ns = time.perf_counter_ns()
        at = incoming.method.loop_word
        if (board := self.board) is not None:
            board.words[at] = began_ns
            board.words[at + 1] = incoming.method.number or incoming.method.put_on(board)
        incoming.run_queue_ns += own_run_queue_since_last_ns(began_ns)
        current_call.set(incoming.context)
        try:
            if incoming.passed is not None:
                await incoming.passed.there()
            args, kwargs = incoming.arguments()
            value = incoming.method.function(*args, **kwargs)
            if hasattr(type(value), "__await__"):  # False if a plain function is below the decorators.
                value = await value
            ok, frames = True, codec.encode(value, self._host.capture)
        except BaseException as error:
            ok, frames = False, self.failed(incoming, error)
        if board is not None:
            board.words[at + 1] = 0
        ended_ns = time.perf_counter_ns()
        own_run_queue_since_last_ns(ended_ns)
        self.finish(incoming, ok, frames, ended_ns)

    # On the member's thread.

    def _execute(self, incoming: IncomingCall) -> None:
        served = incoming.method.owner
        backlog = incoming.channel.backlog
        if backlog.unreceived_bytes >= LIMIT_BYTES and not incoming.cancelled and self._set_aside(incoming):
            return
        if incoming.cancelled:
            self._ended(incoming, False, [], time.perf_counter_ns())
            return
        incoming.started_ns = began_ns = time.perf_counter_ns()
        if (board := self.board) is not None:
            board.words[DEF] = began_ns
            board.words[DEF + 1] = incoming.method.number or incoming.method.put_on(board)
        incoming.run_queue_ns += own_run_queue_since_last_ns(began_ns)
        # Waiting until the slot is free counts as waiting behind other methods; from then until this line, the time is
        # rlmesh's overhead.
        incoming.ready_ns = max(incoming.ready_ns, served.executor.free_since_ns)
        token = current_call.set(incoming.context)
        try:
            args, kwargs = incoming.arguments()
            value = incoming.method.function(*args, **kwargs)
            if type(value) is FutureSequence or isinstance(value, Future):
                value = value.result()
            elif hasattr(type(value), "__await__"):
                value = self.awaited(incoming, value)
            ok, frames = True, codec.encode(value, self._host.capture)
        except BaseException as error:
            ok, frames = False, self.failed(incoming, error)
        finally:
            current_call.reset(token)
            if board is not None:
                board.words[DEF + 1] = 0
        ended_ns = time.perf_counter_ns()
        if incoming.method.serial:
            served.executor.free_since_ns = ended_ns
        own_run_queue_since_last_ns(ended_ns)
        self.finish(incoming, ok, frames, ended_ns)

    def awaited(self, incoming: IncomingCall, value: Awaitable[Any], *, closing: bool = False) -> Any:
        """Run `await_elsewhere` with the loop where an ``async def`` method of this member would run."""
        post = self._loop.call_soon_threadsafe if incoming.method.owner.inline else self._host.post_to_user
        return await_elsewhere(incoming, value, post, lambda: self.ending, self.board, closing=closing)

    def finish(self, incoming: IncomingCall, ok: bool, frames: Frames, ended_ns: int) -> None:
        if self.forked:
            end_child(None)
        incoming.context.over = True
        self._ended(incoming, ok, frames, ended_ns)
        if incoming.exit is not None:
            # After the reply, so that the caller learns that the method called sys.exit, not only that it died.
            self._host.system_exit(incoming.exit.code)

    def failed(self, incoming: IncomingCall, error: BaseException) -> Frames:
        if self.forked:
            end_child(error)
        call = incoming.call
        if isinstance(error, asyncio.CancelledError):
            if self.ending:
                incoming.cancelled = True  # No reply: the report of the process's end tells the caller more.
            text = f"{call.target}.{call.method}() was cancelled"
            if incoming.cancelled:
                role, rank = split_name(call.target)
                error = CallCancelled(text, role=role, rank=rank, method=call.method, executed="yes")
            elif not error.args:
                error.args = (f"{text} by its own code",)
        record = failure.record(error, executed="no" if incoming.refused else "yes")
        if call.flags & _NO_REPLY:
            logger.error("notification %s.%s() failed:\n%s", call.target, call.method, record.traceback)
        if isinstance(error, SystemExit):
            incoming.exit = error
        return codec.encode(record)
