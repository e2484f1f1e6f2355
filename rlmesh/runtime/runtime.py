"""`Runtime`: one endpoint of one process. Opens and closes everything that calls need."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from rlmesh.errors import AuthenticationFailed, UsageError, VersionMismatch, WireError
from rlmesh.runtime.address import AddressBook
from rlmesh.runtime.calls import Calls, PendingCall
from rlmesh.runtime.channel import Channel, check_hello
from rlmesh.runtime.context import served_call
from rlmesh.runtime.dispatch import Dispatcher, Served
from rlmesh.runtime.executors import SerialExecutor
from rlmesh.runtime.future import Future, register_loop_thread, unregister_loop_thread
from rlmesh.runtime.handle import CallOptions, MemberHandle
from rlmesh.runtime.rpc import exported
from rlmesh.runtime.timing import (
    CallLedger,
    CallStats,
    GroupTimer,
    RunQueueMeter,
    own_run_queue_since_last_ns,
    thread_ids_named,
)
from rlmesh.runtime.transport import Link
from rlmesh.runtime.zmq_transport import ZmqTransport
from rlmesh.wire import codec
from rlmesh.wire.envelope import (
    ANY_INCARNATION,
    PROTOCOL_VERSION,
    Call,
    Cancel,
    Frames,
    Hello,
    Refused,
    Reply,
    Welcome,
    unpack,
)

if TYPE_CHECKING:
    from rlmesh.job.status import ExitInfo

logger = logging.getLogger(__name__)

DEFAULT_CALL_TIMEOUT_S = 1800.0
_LINGER_S = 1.0
_THREAD_JOIN_S = 5.0


class Runtime:
    """Calls served objects of other processes and serves objects of this one.

    `start` gives a runtime with a loop on a thread of its own, for scripts and workers; `open` one on the
    running loop, for services.
    """

    endpoint: str | None

    def __init__(self, name: str, key: bytes | None, loop: asyncio.AbstractEventLoop, *, embedded: bool) -> None:
        self.name = name
        self.endpoint = None
        self.default_timeout_s = DEFAULT_CALL_TIMEOUT_S
        self.exit_hook: Callable[[object], None] | None = None
        """Called with ``SystemExit.code`` when a served method calls ``sys.exit``."""
        self.rejected_packets = 0
        self._key = key or secrets.token_bytes(32)
        self._loop, self._embedded = loop, embedded
        self._thread_owner: _LoopThread | None = None
        self._loop_ident = 0
        self._posts: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._posted = False
        self._transport = ZmqTransport(self, loop)
        self._calls = Calls(name, self._key, loop, self._transport)
        self._dispatcher = Dispatcher(self, loop)
        self._incoming: dict[Link, Channel] = {}
        self._ledger = CallLedger()
        self._meter = RunQueueMeter()
        self._user: _LoopThread | None = None
        self._main: Served | None = None
        self._expected: set[str] = set()
        self._closed = False

    # Opening and closing.

    @classmethod
    def start(
        cls, *, name: str = "client", key: bytes | None = None, socket_dir: str | Path | None = None,
        bind: bool | str = True,
    ) -> Runtime:  # fmt: skip
        """A runtime with its own loop on its own thread; close it with `close` or a ``with`` block.

        Args:
            name: what peers and logs call this process.
            key: the job's secret; None makes one, so that only this process's own peers know it.
            socket_dir: private directory (mode 0700) for the socket; None listens on loopback TCP.
            bind: False for a pure caller; text for an address of your choice.
        """
        thread = _LoopThread(f"rlmesh-io-{name}")
        try:
            runtime: Runtime = thread.run(lambda: cls._make(name, key, socket_dir, bind, thread))
        except BaseException:
            thread.stop()
            raise
        return runtime

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, name: str = "client", key: bytes | None = None, socket_dir: str | Path | None = None,
        bind: bool | str = True,
    ) -> AsyncIterator[Runtime]:  # fmt: skip
        """A runtime on the running loop: no thread, no signal handler. Arguments as `start`."""
        runtime = cls._make(name, key, socket_dir, bind, None)
        try:
            yield runtime
        finally:
            await asyncio.sleep(0)  # Lets packets of this turn go out.
            runtime.close()

    @classmethod
    def _make(
        cls, name: str, key: bytes | None, socket_dir: str | Path | None, bind: bool | str, thread: _LoopThread | None
    ) -> Runtime:
        runtime = cls(name, key, asyncio.get_running_loop(), embedded=thread is None)
        try:
            if bind:
                address = bind if isinstance(bind, str) else _address(socket_dir)
                runtime.endpoint = runtime._transport.bind(address)
        except BaseException:
            runtime._transport.close(0)
            raise
        runtime._loop_ident = threading.get_ident()
        if thread is not None:
            runtime._thread_owner = thread
        register_loop_thread(name)
        runtime._meter.add(threading.get_native_id())
        for thread_id in thread_ids_named("ZMQbg"):
            runtime._meter.add(thread_id)
        return runtime

    def close(self) -> None:
        """End pending calls, send what is queued for at most a second, release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if default_runtime_or_none() is self:
            set_default_runtime(None)
        for served in self._dispatcher.served():
            served.close()
        if self._user is not None:
            self._user.stop()
        if self._thread_owner is not None:
            self._thread_owner.run(self._close_on_loop)
            self._thread_owner.stop()
        else:
            self._close_on_loop()
        unregister_loop_thread(self._loop_ident)
        self._meter.close()

    def _close_on_loop(self) -> None:
        self._run_posts()
        for channel in self._incoming.values():
            channel.flush()
        self._calls.close()
        self._transport.close(_LINGER_S)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Serving.

    def expect(self, name: str) -> None:
        """Say that ``name`` will be served here, its ``def`` methods by `run_main`: calls that come before
        `serve` and `run_main` wait for them, until their deadlines."""
        self._expected.add(name)
        self._on_loop(self._dispatcher.expect, name)

    def serve(
        self, name: str, obj: object, *, incarnation: int = 0,
        functions: Mapping[str, Callable[..., Any]] | None = None, inline: bool = False,
    ) -> None:  # fmt: skip
        """Let peers call the ``@rpc`` methods of ``obj`` (and ``functions``, by name) under ``name``.

        Args:
            inline: run ``async def`` methods on the runtime's own loop; always so where it is embedded.
        """
        served = Served(name, incarnation, {**(functions or {}), **exported(obj)}, inline=inline or self._embedded)
        if self._main is None and not name.startswith("@"):
            self._main = served
        if name in self._expected:
            self._expected.discard(name)
            served.executor.hold()
        self._dispatcher.serve(served)
        self._on_loop(self._dispatcher.release, name)

    def unserve(self, name: str) -> None:
        """Serve ``name`` no longer; calls that run already end normally."""

        def drop() -> None:
            served = self._dispatcher.unserve(name)
            if served is not None:
                served.close()

        self._on_loop(drop)

    def run_main(self) -> None:
        """Run ``def`` methods of the first served member on the calling thread until `stop_main`."""
        self._main_executor().run(own_run_queue_since_last_ns)

    def stop_main(self, *, now: bool = False) -> None:
        """Let `run_main` return: after the methods that are queued, or (``now``) after the one that runs."""
        self._main_executor().stop(now=now)

    def main_busy(self) -> AbstractContextManager[None]:
        """While user code occupies the thread of `run_main`: ``def`` methods run on a second thread."""
        return self._main_executor().busy()

    def _main_executor(self) -> SerialExecutor:
        if self._main is None:
            raise UsageError("serve a member before run_main(): there is nothing whose methods could run")
        return self._main.executor

    # Calling.

    def peer(self, name: str, endpoint: str, *, incarnation: int | None = None) -> MemberHandle:
        """A handle to an object that another process serves, by its address."""
        number = ANY_INCARNATION if incarnation is None else incarnation
        return MemberHandle(self, name, endpoint=endpoint, incarnation=number)

    def submit(
        self, name: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CallOptions, *,
        endpoint: str | None = None, incarnation: int = ANY_INCARNATION, reply: bool = True,
        timer: GroupTimer | None = None,
    ) -> Future[Any]:  # fmt: skip
        """Send one call. Its arguments are captured before this returns."""
        frames = codec.encode((args, dict(kwargs)))
        return self.submit_encoded(
            name, method, frames, options, endpoint=endpoint, incarnation=incarnation, reply=reply, timer=timer
        )

    def encode_calls(self, method: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Frames]:
        """Frames per member; members that get the same arguments share them, encoded once."""
        encoded: dict[int, Frames] = {}
        for call in calls:
            if id(call) not in encoded:
                encoded[id(call)] = codec.encode(call)
        return [encoded[id(call)] for call in calls]

    def submit_encoded(
        self, name: str, method: str, frames: Frames, options: CallOptions, *, endpoint: str | None = None,
        incarnation: int = ANY_INCARNATION, reply: bool = True, timer: GroupTimer | None = None,
    ) -> Future[Any]:  # fmt: skip
        context = served_call()
        timeout = options.timeout_s if options.timeout_s is not None else self.default_timeout_s
        chain: tuple[str, ...] = ()
        if context is not None:
            chain = context.chain
            timeout = max(0.0, min(timeout, context.remaining_s()))
        deadline = time.monotonic() + timeout
        call = PendingCall(name, method, deadline, chain, endpoint=endpoint, incarnation=incarnation)
        call.frames = frames
        future: Future[Any] = Future(call.describe, lambda: self._on_loop(self._calls.cancel, call))
        future.timer = call.timer = timer
        if reply:
            call.future = future
            if context is not None:
                context.children.add(future)
        self._on_loop(self._calls.start, call)
        return future

    def timer(self, name: str, method: str, members: int) -> GroupTimer:
        return GroupTimer(self._ledger, self._meter, name.partition(":")[0], method, members)

    def take_call_stats(self) -> tuple[CallStats, ...]:
        """Where the time of this process's calls went since this was called before."""
        return self._ledger.take()

    def pending(self) -> list[str]:
        """Whom this process waits for: one line per call."""
        return [call.describe() for call in self._calls.pending()]

    def address_book(self) -> AddressBook:
        book = self._calls.book
        if book is None:
            raise UsageError(
                f"{self.name} does not know the job's members yet: roles can be called from run(), from methods, and "
                "from setup() once all members are up"
            )
        return book

    @property
    def key(self) -> bytes:
        """The secret that peers must hold."""
        return self._key

    def set_address_book(self, book: AddressBook) -> None:
        self._on_loop(self._calls.set_book, book)

    def member_lost(self, info: ExitInfo) -> None:
        """Tell the caller's side that a member's process ended: its calls fail now, later ones at once."""
        self._on_loop(self._calls.member_lost, info)

    # For the parts of the runtime.

    def call_soon(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run ``fn`` on the runtime's loop, from any thread."""
        self.post(fn, *args)

    def _on_loop(self, fn: Callable[..., Any], *args: Any) -> None:
        if threading.get_ident() == self._loop_ident:
            fn(*args)
        else:
            self.post(fn, *args)

    def post(self, fn: Callable[..., Any], *args: Any) -> None:
        # One wake-up of the loop for all that is posted before it runs: a wake-up costs more than the work.
        self._posts.append((fn, args))
        if not self._posted:
            self._posted = True
            try:
                self._loop.call_soon_threadsafe(self._run_posts)
            except RuntimeError:
                self._posted = False  # The loop is closed: the process is ending.

    def _run_posts(self) -> None:
        self._posted = False
        while self._posts:
            fn, args = self._posts.popleft()
            fn(*args)

    def user_loop(self) -> asyncio.AbstractEventLoop:
        if self._embedded:
            return self._loop
        if self._user is None:
            self._user = _LoopThread(f"rlmesh-user-{self.name}")
        return self._user.loop

    def system_exit(self, code: object) -> None:
        if self.exit_hook is not None:
            self.exit_hook(code)
        else:
            logger.warning("%s: a served method called sys.exit(%r); it was answered as an error", self.name, code)

    def on_packet(self, link: Link, frames: Frames) -> None:
        run_queue_ns = own_run_queue_since_last_ns()
        channel = self._calls.channel_of(link) or self._incoming.get(link)
        if channel is None:
            channel = self._incoming[link] = Channel(link, self._loop)
        try:
            # Headers are msgpack, which runs no code; payloads are decoded only for authenticated peers.
            for header, payload in unpack(frames):
                self._on_message(channel, link, header, payload, run_queue_ns)
        except WireError as error:
            self._reject(channel, link, error)
        except Exception:
            # One message must never stop the transport from reading the next ones.
            logger.exception("%s failed on a packet from %s", self.name, channel.peer_name)

    def _on_message(self, channel: Channel, link: Link, header: Any, payload: Frames, run_queue_ns: int) -> None:
        kind = type(header)
        if kind is Reply:
            self._calls.on_reply(link, header, payload, run_queue_ns)
        elif kind is Hello:
            self._on_hello(channel, header)
        elif kind is Welcome:
            self._calls.on_welcome(link, header)
        elif kind is Refused:
            self._calls.on_refused(link, header)
        elif not channel.authenticated:
            raise AuthenticationFailed(f"a {kind.__name__} came before a valid Hello")
        elif kind is Call:
            self._dispatcher.on_call(channel, header, payload, run_queue_ns)
        elif kind is Cancel:
            self._dispatcher.on_cancel(channel, header.call_id)

    def _on_hello(self, channel: Channel, hello: Hello) -> None:
        try:
            check_hello(hello, self._key, self.endpoint or "")
        except VersionMismatch as error:
            channel.send(Refused(PROTOCOL_VERSION, str(error)), [])
            return
        channel.authenticated = True
        channel.peer_name = hello.name
        channel.send(Welcome(PROTOCOL_VERSION, self.name), [])

    def _reject(self, channel: Channel, link: Link, error: WireError) -> None:
        self.rejected_packets += 1
        log = logger.warning if self.rejected_packets in (1, 10, 100, 1000) else logger.debug
        log("%s dropped a packet from %s (%d so far): %s", self.name, channel.peer_name, self.rejected_packets, error)
        if not channel.authenticated:
            self._incoming.pop(link, None)
            link.close()

    def on_lost(self, link: Link, reason: str) -> None:
        self._incoming.pop(link, None)
        self._calls.on_lost(link, reason)


def _address(socket_dir: str | Path | None) -> str:
    return f"ipc://{socket_dir}/{secrets.token_hex(4)}" if socket_dir is not None else "tcp://127.0.0.1:*"


class _LoopThread:
    """A loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def run(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` on the loop and give its result."""
        done: Future[Any] = Future()

        async def body() -> None:
            try:
                done.set_result(fn())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(body()))
        return done.result(30.0)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(_THREAD_JOIN_S)
        if self._thread.is_alive():
            logger.warning("thread %s does not end: a coroutine blocks its loop", self._thread.name)

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()

        async def finish() -> None:
            if tasks:
                await asyncio.wait(tasks, timeout=_THREAD_JOIN_S / 2)
            self.loop.stop()

        self.loop.create_task(finish())


_default: Runtime | None = None


def set_default_runtime(runtime: Runtime | None) -> None:
    """The runtime that ``RoleGroup("X")`` uses in this process."""
    global _default
    _default = runtime


def default_runtime_or_none() -> Runtime | None:
    return _default


def default_runtime() -> Runtime:
    if _default is None:
        raise UsageError(
            "this process is not part of a job, so it cannot call roles: RoleGroup works in role classes and entry "
            "points that a job started. In a program of your own, pass RoleGroup(…, runtime=…)"
        )
    return _default
