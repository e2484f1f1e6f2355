"""Streams: the items of a remote generator, one by one, with back-pressure. The caller's side.

A stream is a call like any other (deadline, cancellation and the death of the member end it), whose callee sends
items before its reply. The callee (`rlmesh.runtime.serving.stream_server`) may be ahead of the consumer by a window of
items; the consumer gives it more credit as it takes items.
"""

from __future__ import annotations

import asyncio
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from rlmesh.errors import CallError, UsageError
from rlmesh.runtime.calling.unretrieved import log_error
from rlmesh.runtime.future import Future, refuse_to_block, set_done
from rlmesh.runtime.process import forked
from rlmesh.wire import codec
from rlmesh.wire.envelope import Credit, Frames

if TYPE_CHECKING:
    from rlmesh.runtime.calling.pending import PendingCall

T_co = TypeVar("T_co", covariant=True)


class StreamSource:
    """One member's part of a stream, at the caller."""

    def __init__(self, inbox: Inbox, call: PendingCall) -> None:
        self.call = call
        self.arrived = 0
        self._inbox = inbox
        self._taken = 0

    def on_item(self, number: int, frames: Frames) -> None:
        """On the runtime's loop."""
        if number < self.arrived:
            return  # A duplicate.
        if number > self.arrived:
            future = self.call.future
            assert future is not None
            text = f"item {self.arrived} of the stream {self.call.describe()} was lost on its way"
            self.call.cancel()
            future.end(None, self.call.error(CallError, text, "yes"))
            return
        self.arrived += 1
        self._inbox.put(self, frames)

    def took_one(self) -> None:
        """Count an item that the consumer took; the callee gets new credit for each half window."""
        self._taken += 1
        if self._taken * 2 >= self._inbox.window:
            count, self._taken = self._taken, 0
            peer, future = self.call.peer, self.call.future
            if peer is not None and future is not None and not future.done():
                peer.channel.send(Credit(self.call.call_id, count), [])


class Inbox:
    """The items of a stream, of all members, that arrived and were not taken yet."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.sources: list[StreamSource] = []
        self._lock = allocate_lock()
        self._ready: deque[tuple[StreamSource, Frames | BaseException]] = deque()
        self._open = 0
        self._wakers: list[Callable[[], None]] = []

    def add(self, call: PendingCall) -> StreamSource:
        source = StreamSource(self, call)
        self.sources.append(source)
        self._open += 1
        assert call.future is not None
        call.future.add_done_callback(lambda future: self._ended(source, future))
        return source

    def _ended(self, source: StreamSource, future: Future[int]) -> None:
        """Take the end of one member's part."""
        error = future.exception()
        if error is None and future.result() != source.arrived:
            text = f"{source.arrived} of {future.result()} items arrived from {source.call.describe()}"
            error = source.call.error(CallError, text, "yes")
        if error is None:
            self._close_one()
            return
        if isinstance(error, CallError) and source.arrived and CallError.details(error).executed == "maybe":
            error.executed = "yes"  # The method sent items, so it ran.
        self.put(source, error)

    def put(self, source: StreamSource, what: Frames | BaseException) -> None:
        with self._lock:
            self._ready.append((source, what))
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def _close_one(self) -> None:
        with self._lock:
            self._open -= 1
            wakers, self._wakers = (self._wakers, []) if self._open == 0 else ([], self._wakers)
        for wake in wakers:
            wake()

    def take(self, wake: Callable[[], None]) -> tuple[StreamSource, Frames | BaseException] | None:
        """The next item; None if there is none yet, in which case ``wake`` is called when that may have changed.

        Raises:
            StopIteration: all members have ended.
        """
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            if self._open == 0:
                raise StopIteration
            self._wakers.append(wake)
            return None

    def forget(self) -> None:
        """Close the inbox of a stream that was collected before its end, and log an error that nobody took."""
        with self._lock:
            errors = [what for _, what in self._ready if isinstance(what, BaseException)]
        if errors:
            log_error(errors[0])
        self.close()

    def close(self) -> None:
        """End the work at the members, and drop the items that arrived."""
        with self._lock:
            self._open = 0
            self._ready.clear()
            wakers, self._wakers = self._wakers, []
        for source in self.sources:
            if source.call.future is not None:
                source.call.future.cancel()
        with self._lock:
            self._ready.clear()
        for wake in wakers:
            wake()


class Stream(Generic[T_co]):
    """The items of a generator method: a plain iterator (``for``) and an asynchronous one (``async for``).

    From several members, items come in the order in which they arrive; those of one member in its own order. A
    member's failure is raised after the items that came before it, and ends the stream. The deadline is that of the
    whole stream. A stream that is left early, closed or collected ends the generators.
    """

    def __init__(self, inbox: Inbox, post: Callable[..., None]) -> None:
        self._inbox = inbox
        self._post = post
        self._ended = False
        self._fork = forked.count

    def waiting_for(self) -> str:
        """The calls that the stream waits for, member by member. Empty once the stream has ended."""
        calls = [source.call for source in self._inbox.sources if source.call.future and not source.call.future.done()]
        return "" if self._ended else "; ".join(call.explain() for call in calls)

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        while True:
            refuse_to_block(lambda: self.waiting_for() or "a stream")
            gate = allocate_lock()
            gate.acquire()
            found = self._take(gate.release)
            if found is not None:
                return self._opened(*found)
            gate.acquire()  # Released at the latest at the deadline of the calls.

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        loop = asyncio.get_running_loop()
        thread = threading.get_ident()
        while True:
            waiter: asyncio.Future[None] = loop.create_future()

            def wake(waiter: asyncio.Future[None] = waiter) -> None:
                if threading.get_ident() == thread:
                    set_done(waiter)
                    return
                try:
                    loop.call_soon_threadsafe(set_done, waiter)
                except RuntimeError:
                    pass  # The consumer's loop was closed meanwhile.

            try:
                found = self._take(wake)
            except StopIteration:
                raise StopAsyncIteration from None
            if found is not None:
                return self._opened(*found)
            await waiter

    def close(self) -> None:
        """End the generators. From any thread; may be called more than once."""
        if not self._ended:
            self._ended = True
            if self._fork == forked.count:
                self._inbox.close()

    async def aclose(self) -> None:
        self.close()

    def _take(self, wake: Callable[[], None]) -> tuple[StreamSource, Frames | BaseException] | None:
        if self._fork != forked.count:
            raise UsageError(f"the items of this stream come to the process that made it: {forked.refusal('it')}")
        try:
            return self._inbox.take(wake)
        except StopIteration:
            self._ended = True
            raise

    def _opened(self, source: StreamSource, what: Frames | BaseException) -> T_co:
        if isinstance(what, BaseException):
            self.close()
            raise what
        source.took_one()
        try:
            item: T_co = codec.decode(what)
        except Exception as broken:  # Also a StopIteration of the item's own code, which would end the loop.
            self.close()
            call = source.call
            text = f"an item of {call.name}.{call.method}() cannot be decoded here: {type(broken).__name__}: {broken}"
            raise call.error(CallError, text, "yes") from broken
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run this on any thread, inside any lock: the work is left to the runtime's loop.
        if not self._ended:
            self._post(self._inbox.forget)

    def __repr__(self) -> str:
        return f"<Stream {self.waiting_for() or 'that has ended'}>"
