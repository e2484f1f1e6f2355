"""Streams at the callee: a generator produces items as long as its consumer has given credit for them.

A ``def`` generator without credit holds no thread: other methods of the member run meanwhile, as they can between two
steps of a local generator.
"""

from __future__ import annotations

import asyncio
import time
from _thread import allocate_lock
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol

from rlmesh.errors import UsageError
from rlmesh.runtime.future import set_done
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.activity_board import DEF, Board
from rlmesh.runtime.serving.incoming import IncomingCall, current_call
from rlmesh.wire import codec
from rlmesh.wire.envelope import Frames, Item


class StreamDispatcher(Protocol):
    """The attributes and methods of the dispatcher that a stream uses."""

    active_at: float
    board: Board | None

    @property
    def capture(self) -> codec.Capture: ...

    def begin(self, incoming: IncomingCall) -> None: ...

    def awaited(self, incoming: IncomingCall, value: Awaitable[Any], *, closing: bool = False) -> Any: ...

    def failed(self, incoming: IncomingCall, error: BaseException) -> Frames: ...

    def finish(self, incoming: IncomingCall, ok: bool, frames: Frames, ended_ns: int) -> None: ...


class StreamServer:
    """A stream at its callee: a generator, and the credit that its consumer gave."""

    def __init__(self, dispatcher: StreamDispatcher, incoming: IncomingCall, window: int) -> None:
        self._dispatcher, self._incoming = dispatcher, incoming
        self._lock = allocate_lock()
        self._credit = window
        self._sent = 0
        self._iterator: Iterator[Any] | None = None
        self._suspended = False
        self._on_credit: Callable[[], None] | None = None

    @property
    def waits(self) -> bool:
        """True while the producer waits for the consumer's credit."""
        return self._suspended or self._on_credit is not None

    def on_credit(self, count: int) -> None:
        """Add credit for items that the consumer took. Runs on the runtime's loop."""
        with self._lock:
            self._credit += count
            resume, self._suspended = self._suspended, False
            on_credit, self._on_credit = self._on_credit, None
        if resume:
            self._dispatcher.begin(self._incoming)
        if on_credit is not None:
            on_credit()

    def cancel(self) -> None:
        """End the stream, whose consumer is gone; the generator is closed where it runs. Runs on the runtime's loop."""
        with self._lock:
            resume, self._suspended = self._suspended, False
        if resume:
            self._dispatcher.begin(self._incoming)

    # `def` generators: on a thread of the member.

    def run(self) -> None:
        """Produce items until the credit is used up, or to the end."""
        incoming = self._incoming
        now_ns = time.perf_counter_ns()
        if not incoming.started_ns:
            incoming.started_ns = now_ns
        board = self._dispatcher.board
        incoming.method.begins(board, DEF, now_ns)
        token = current_call.set(incoming.context)
        try:
            if not self._make_items():
                return
            ok, frames = True, codec.encode(self._sent)
        except BaseException as error:
            ok, frames = False, self._dispatcher.failed(incoming, error)
        finally:
            current_call.reset(token)
            if board is not None:
                board.words[DEF + 1] = 0
        self._dispatcher.finish(incoming, ok, frames, time.perf_counter_ns())

    def _make_items(self) -> bool:
        """Produce items; False if the generator waits for credit, True at its end."""
        incoming = self._incoming
        if self._iterator is None:
            if incoming.cancelled:
                return True
            args, kwargs = incoming.arguments()
            made = incoming.method.generator(*args, **kwargs)
            if hasattr(type(made), "__await__"):
                made = self._dispatcher.awaited(incoming, made)
            if hasattr(made, "__anext__"):
                made = _steps(made, partial(self._dispatcher.awaited, incoming))
            if not hasattr(made, "__next__"):
                raise _no_generator(incoming, made)
            self._iterator = made
        while True:
            if incoming.cancelled:
                _close(self._iterator)
                return True
            with self._lock:
                if self._credit == 0:
                    self._suspended = True
                    return False
                self._credit -= 1
            try:
                item = next(self._iterator)
            except StopIteration:
                return True
            self._send(item)

    # `async def` generators: on a loop.

    async def run_async(self) -> None:
        incoming = self._incoming
        if incoming.cancelled:
            self._dispatcher.finish(incoming, False, [], time.perf_counter_ns())
            return
        incoming.started_ns = time.perf_counter_ns()
        board, at = self._dispatcher.board, incoming.method.loop_word
        incoming.method.begins(board, at, incoming.started_ns)
        current_call.set(incoming.context)
        try:
            if incoming.passed is not None:
                await incoming.passed.there()
            args, kwargs = incoming.arguments()
            made = incoming.method.generator(*args, **kwargs)
            if hasattr(type(made), "__await__"):
                made = await made
            await self._make_items_async(made)
            ok, frames = True, codec.encode(self._sent)
        except BaseException as error:
            ok, frames = False, self._dispatcher.failed(incoming, error)
        if board is not None:
            board.words[at + 1] = 0
        self._dispatcher.finish(incoming, ok, frames, time.perf_counter_ns())

    async def _make_items_async(self, made: Any) -> None:
        if hasattr(made, "__next__"):
            try:
                for item in made:
                    await self._wait_for_credit()
                    self._send(item)
            finally:
                _close(made)
            return
        if not hasattr(made, "__anext__"):
            raise _no_generator(self._incoming, made)
        try:
            while True:
                await self._wait_for_credit()
                try:
                    item = await anext(made)
                except StopAsyncIteration:
                    return
                self._send(item)
        finally:
            if hasattr(made, "aclose"):
                await made.aclose()

    async def _wait_for_credit(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            waiter: asyncio.Future[None] = loop.create_future()
            with self._lock:
                if self._credit:
                    self._credit -= 1
                    return
                self._on_credit = partial(_set_on, loop, waiter)
            await waiter

    def _send(self, item: Any) -> None:
        incoming = self._incoming
        frames = codec.encode(item, self._dispatcher.capture)
        if not incoming.cancelled:
            incoming.channel.backlog.sent(frames)
            incoming.channel.send(Item(incoming.call.call_id, self._sent), frames)
            self._dispatcher.active_at = clock.now()
        self._sent += 1


def _steps(made: Any, awaited: Callable[..., Any]) -> Iterator[Any]:
    """An iterator for a thread over the items of an asynchronous generator."""

    async def step() -> tuple[Any, ...]:
        try:
            return (await anext(made),)
        except StopAsyncIteration:
            return ()

    try:
        while item := awaited(step()):
            yield item[0]
    finally:
        if hasattr(made, "aclose"):
            awaited(made.aclose(), closing=True)


def _set_on(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(set_done, waiter)
    except RuntimeError:
        pass  # The loop was closed meanwhile.


def _close(iterator: Any) -> None:
    if hasattr(iterator, "close"):
        iterator.close()


def _no_generator(incoming: IncomingCall, made: object) -> Exception:
    if asyncio.iscoroutine(made):
        made.close()
    name = f"{incoming.call.target}.{incoming.call.method}()"
    return UsageError(
        f"{name} was called with stream(), but it gives a {type(made).__name__}, not items: use call(), or make the "
        "method a generator (def or async def, with yield)"
    )
