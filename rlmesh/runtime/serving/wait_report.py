"""Reports which calls the calls running in this process wait for, and which calls are queued behind them.

Members that call each other in a circle wait for ever: each holds a slot that another one needs. No process sees the
whole circle, so each reports its part to the master, about once a second and only while calls wait. Nothing is recorded
when calls are made: a report reads the stacks of threads and tasks.

A wait counts if only an answer can end it: ``result()`` without a timeout, ``await future`` in the method's own task,
``asyncio.gather`` there, the next item of a stream from one member. A wait for the first of several calls, or a wait
with its own timeout, does not count.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmesh.errors import WouldDeadlock
from rlmesh.runtime.calling.gathering import GatheredCalls
from rlmesh.runtime.calling.pending import PendingCall
from rlmesh.runtime.calling.retry import RetriedPart, Retries
from rlmesh.runtime.future import Future
from rlmesh.runtime.serving.coroutines import InContext
from rlmesh.runtime.serving.dispatch import Dispatcher
from rlmesh.runtime.serving.incoming import IncomingCall
from rlmesh.runtime.serving.stream_server import StreamServer
from rlmesh.runtime.streams import Stream

if TYPE_CHECKING:
    from rlmesh.runtime.serving.served_objects import Method

__all__ = ["BlockedCalls", "CallKey", "Holder", "QueuedCall", "blocked_calls", "refuse_queued"]

CallKey = tuple[str, int]
"""The caller's name and its id of the call."""

MAIN = "main thread"
"""The key of the holder for ``setup()`` or ``run()``."""
MOST = 4096
REFUSED_AFTER_S = 0.25
"""Time in which the order to drop calls reaches all members of a circle."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A method, ``setup()`` or ``run()`` that runs here and waits for answers.

    Attributes:
        key: unique within the process.
        what: its name for people, such as ``A:0.go()``.
        waits_for: the calls that must end before it continues.
        since_s: seconds since it began.
        serves: the call that it answers; None for ``setup()`` and ``run()``.
    """

    key: str
    what: str
    waits_for: tuple[CallKey, ...]
    since_s: float
    serves: CallKey | None = None


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """A call that begins when one of the holders with the keys ``behind`` has ended."""

    call: CallKey
    what: str
    behind: tuple[str, ...]
    since_s: float


@dataclass(frozen=True, slots=True)
class BlockedCalls:
    """A process's part of circles of waiting calls."""

    holders: tuple[Holder, ...] = ()
    queued: tuple[QueuedCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.holders)


def blocked_calls(
    dispatcher: Dispatcher, name: str, main_work: tuple[str, float], now_ns: int, older_s: float
) -> BlockedCalls:
    """The calls that wait in this process; empty if no call has been here for ``older_s`` seconds.

    Args:
        name: the name of this process's runtime.
        main_work: the user's code, other than methods, that occupies the main thread (empty for none), and since how
            many seconds.
    """
    early, calls = dispatcher.early(), dispatcher.calls()
    if not early and not any(now_ns - incoming.received_ns >= older_s * 1e9 for incoming in calls):
        return BlockedCalls()
    threads, main_waits = _blocked_threads()
    holders: dict[str, Holder] = {}
    for incoming in calls:
        if incoming.started_ns and not incoming.context.over and not incoming.call.target.startswith("@"):
            waits = threads.get(id(incoming)) or tuple(_of_task(incoming.task))
            if waits:
                key = f"{incoming.channel.peer_name}/{incoming.call.call_id}"
                since_s = (now_ns - incoming.started_ns) / 1e9
                holders[key] = Holder(key, incoming.method.label, _keys(name, waits), since_s, _key_of(incoming))
    if main_work[0] and main_waits:
        holders[MAIN] = Holder(MAIN, main_work[0], _keys(name, main_waits), main_work[1])
    if not holders:
        return BlockedCalls()
    queued = [
        QueuedCall((channel.peer_name, call.call_id), f"{call.target}.{call.method}()", (MAIN,), main_work[1])
        for channel, call in early
        if MAIN in holders
    ]
    queued += _queued(calls, holders, now_ns)
    return BlockedCalls(tuple(holders.values())[:MOST], tuple(queued[:MOST]))


def refuse_queued(
    dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop, keys: Collection[CallKey], text: str
) -> None:
    """Drop calls that have not begun, and refuse them a moment later. Runs on the runtime's loop.

    The delay keeps a call of the same circle from beginning because another call was refused before.
    """
    dropped = [
        (i.channel, i.call) for i in dispatcher.calls() if _key_of(i) in keys and not (i.started_ns or i.cancelled)
    ]
    dropped += [early for early in dispatcher.early() if (early[0].peer_name, early[1].call_id) in keys]
    for channel, call in dropped:
        dispatcher.on_cancel(channel, call.call_id)
        loop.call_later(REFUSED_AFTER_S, dispatcher.refuse, channel, call, WouldDeadlock(text))


def _key_of(incoming: IncomingCall) -> CallKey:
    return incoming.channel.peer_name, incoming.call.call_id


def _keys(name: str, calls: Iterable[PendingCall]) -> tuple[CallKey, ...]:
    return tuple((name, call.call_id) for call in calls)


def _queued(calls: list[IncomingCall], holders: dict[str, Holder], now_ns: int) -> Iterator[QueuedCall]:
    """Calls that can begin only after a holder has ended."""
    running: dict[int, list[str]] = {}
    for incoming in calls:
        if incoming.started_ns and not incoming.context.over and not (incoming.stream and incoming.stream.waits):
            running.setdefault(_place(incoming.method), []).append(
                f"{incoming.channel.peer_name}/{incoming.call.call_id}"
            )
    for incoming in calls:
        method = incoming.method
        if incoming.started_ns or incoming.cancelled or incoming.call.target.startswith("@"):
            continue
        behind = [MAIN] if method.waits_for_main else running.get(_place(method), [])
        if not method.shares_thread and len(behind) != method.running:
            continue  # a call is about to begin or to end
        if behind and all(key in holders for key in behind):
            since_s = (now_ns - incoming.received_ns) / 1e9
            yield QueuedCall(_key_of(incoming), method.label, tuple(behind), since_s)


def _place(method: Method) -> int:
    """An id that is equal for methods whose calls wait for each other."""
    return id(method.owner.executor) if method.shares_thread else id(method)


# Threads.


def _blocked_threads() -> tuple[dict[int, tuple[PendingCall, ...]], tuple[PendingCall, ...]]:
    """The calls that threads wait for, by ``id()`` of the `IncomingCall` that the thread serves; and the calls that the
    main thread waits for while it serves none."""
    found: dict[int, tuple[PendingCall, ...]] = {}
    main: tuple[PendingCall, ...] = ()
    main_ident = threading.main_thread().ident
    for ident, frame in sys._current_frames().items():
        waits, incoming = _of_frames(frame)
        if not waits:
            continue
        if incoming is not None:
            found[id(incoming)] = waits
        elif ident == main_ident:
            main = waits
    return found, main


def _of_frames(frame: types.FrameType | None) -> tuple[tuple[PendingCall, ...], IncomingCall | None]:
    """The calls that a thread waits for, and the call that it serves."""
    waits: tuple[PendingCall, ...] = ()
    while frame is not None:
        code = frame.f_code
        if not waits and code is Future._block.__code__:
            if frame.f_locals.get("timeout") is not None:
                return (), None
            waits = tuple(_calls_of(frame.f_locals["self"]))
        elif not waits and code is Stream.__next__.__code__:
            waits = tuple(_calls_of_stream(frame.f_locals["self"]))
        elif code is Dispatcher._execute.__code__:
            return waits, frame.f_locals["incoming"]
        elif code is StreamServer.run.__code__:
            return waits, frame.f_locals["self"]._incoming
        frame = frame.f_back
    return waits, None


def _calls_of(future: Future[Any]) -> Iterator[PendingCall]:
    """The calls that must end before a future ends."""
    origin = future._origin
    if future.done() or origin is None:
        return
    if isinstance(origin, PendingCall):
        if origin.passed is None:
            yield origin
        else:
            for need in origin.passed.awaited():
                yield from _calls_of(need)
    elif isinstance(origin, GatheredCalls):
        for member in origin.futures:
            yield from _calls_of(member)
    elif isinstance(origin, Retries) and origin._current is not None:
        yield from _calls_of(origin._current)
    elif isinstance(origin, RetriedPart):
        for member in origin.attempt():
            yield from _calls_of(member)


def _calls_of_stream(stream: Stream[Any]) -> Iterator[PendingCall]:
    calls = [source.call for source in stream._inbox.sources if source.call.future and not source.call.future.done()]
    return iter(calls if len(calls) == 1 else ())  # with several calls, the next item may come from any of them


# Tasks.


def _of_task(task: asyncio.Task[Any] | None) -> Iterator[PendingCall]:
    """The calls that must end before a task continues."""
    if task is None or task.done():
        return
    waiter = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, asyncio.tasks._GatheringFuture):  # type: ignore[attr-defined]
        for child in getattr(waiter, "_children", ()):
            if isinstance(child, asyncio.Task):
                yield from _of_task(child)
        return
    yield from _of_awaited(task.get_coro())


def _of_awaited(awaited: Any) -> Iterator[PendingCall]:
    """Follow ``await`` from a coroutine down to the future at its end."""
    while awaited is not None:
        if isinstance(awaited, types.CoroutineType):
            if awaited.cr_running or awaited.cr_code is asyncio.wait_for.__code__:
                return
            awaited = awaited.cr_await
        elif isinstance(awaited, types.GeneratorType):
            frame = awaited.gi_frame
            if frame is None or awaited.gi_running:
                return
            if awaited.gi_code is Future.__await__.__code__:
                yield from _calls_of(frame.f_locals["self"])
                return
            inside = awaited.gi_code is InContext.__await__.__code__
            awaited = frame.f_locals["self"]._coroutine if inside else awaited.gi_yieldfrom
        else:
            return
