"""`Runtime`: one endpoint of one process. Opens and closes everything that calls need."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlmesh.errors import MethodNotFound, UsageError
from rlmesh.runtime.argument_types import require
from rlmesh.runtime.calling.busy_poll import BusyPoll
from rlmesh.runtime.calling.calls import Calls
from rlmesh.runtime.calling.outbound import Submission
from rlmesh.runtime.connections.address_book import AddressBook, MemberExit
from rlmesh.runtime.connections.bulk_channels import BulkChannels
from rlmesh.runtime.connections.channel import Channel, turn_loops
from rlmesh.runtime.connections.handshake import Authenticator
from rlmesh.runtime.connections.inbound import Reception
from rlmesh.runtime.connections.network import NetworkOptions, options_of_environment
from rlmesh.runtime.connections.security import check_key, find_key, make_key
from rlmesh.runtime.connections.shm_transfer import ShmTransfer
from rlmesh.runtime.default_runtime import default_runtime_or_none, set_default_runtime
from rlmesh.runtime.future import register_loop_thread, unregister_loop_thread
from rlmesh.runtime.process import clock, forked
from rlmesh.runtime.process.loops import LoopThread, Posts, with_threads
from rlmesh.runtime.process.scheduling_delay import RunQueueMeter, own_run_queue_since_last_ns, thread_ids_named
from rlmesh.runtime.rpc import exported, exported_functions
from rlmesh.runtime.serving.activity_board import Board
from rlmesh.runtime.serving.dispatch import Dispatcher
from rlmesh.runtime.serving.executors import SerialExecutor
from rlmesh.runtime.serving.served_objects import Served
from rlmesh.runtime.transport.base import Link, Transport, local_address

if TYPE_CHECKING:
    from rlmesh.runtime.calling.peer_table import JobEnd
    from rlmesh.runtime.connections.joining import Joining
    from rlmesh.runtime.serving.wait_report import BlockedCalls, CallKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_CALL_TIMEOUT_S = 1800.0
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,80}")
_LINGER_S = 1.0
_DRAIN_POLL_S = 0.005
_EMBEDDED_LINGER_S = 0.1
"""A service's loop stands still for no longer."""


class Runtime(Submission, Reception):
    """Calls served objects of other processes and serves objects of this one.

    `start` gives a runtime with a loop on a thread of its own, for scripts and workers; `open` one on the
    running loop, for services.
    """

    endpoint: str | None
    public_endpoint: str | None
    """Where processes of other nodes connect, in a job of several nodes."""

    def __init__(
        self, name: str, key: bytes | None, loop: asyncio.AbstractEventLoop, job_id: str | None,
        node_rank: int = 0, network: NetworkOptions | None = None, *, embedded: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.endpoint = self.public_endpoint = None
        self._node_rank = node_rank
        self.default_timeout_s = DEFAULT_CALL_TIMEOUT_S
        self.exit_hook: Callable[[object], None] | None = None
        """Called with ``SystemExit.code`` when a served method calls ``sys.exit``."""
        self._key = make_key() if key is None else check_key(key)
        self._authenticator = Authenticator(name, self._key)
        self.strangers = self._authenticator.strangers
        self._loop, self._embedded = loop, embedded
        self._thread_owner: LoopThread | None = None
        self._loop_ident = 0
        self._posts = Posts(loop)
        self.network = network or options_of_environment()
        self._later = loop.call_later
        self._transports: dict[str, Transport] = {}
        self._meter = RunQueueMeter()
        self._shm = ShmTransfer(
            name, self._key, job_id, node_rank, loop, self.post,
            lambda: threading.get_ident() == self._loop_ident,
        )  # fmt: skip
        self._calls = Calls(loop, self._connect, self._authenticator.begin, self.post, self._meter)
        self._calls.fetch = self.fetch
        self._dispatcher = Dispatcher(self, loop)
        self._bulk = BulkChannels(self, loop, self.network, self._key)
        self._incoming: dict[Link, Channel] = {}
        self._user: LoopThread | None = None
        self._main_work: tuple[str, float] = ("", 0.0)
        """What of the user's code, other than methods, occupies the main thread, and since when."""
        self._opening = threading.Lock()
        self._main: Served | None = None
        self._expected: set[str] = set()
        self._closed = False

    # Opening and closing.

    @classmethod
    def start(
        cls, *, name: str = "client", key: bytes | None = None, socket_dir: str | Path | None = None,
        bind: bool | str = True, public: str | None = None, job_id: str | None = None, node_rank: int = 0,
        network: NetworkOptions | None = None,
    ) -> Runtime:  # fmt: skip
        """A runtime with its own loop on its own thread; close it with `close` or a ``with`` block.

        Args:
            name: what peers and logs call this process.
            key: the job's secret; None makes one, so that only this process's own peers know it.
            socket_dir: private directory (mode 0700) for the socket; None listens on loopback TCP.
            bind: False for a pure caller; text for an address of your choice.
            public: a TCP address to listen at besides, for processes of other nodes.
            job_id, node_rank: in the names of shared memory, by which the node's guardian finds what was left.
            network: limits and transports; None takes what the environment says.
        """
        thread = LoopThread(f"rlmesh-io-{name}")
        try:
            make = partial(cls._make, name, key, socket_dir, bind, public, job_id, node_rank, network, thread)
            runtime: Runtime = thread.run(make)
        except BaseException:
            thread.stop()
            raise
        return runtime

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, name: str = "client", key: bytes | None = None, socket_dir: str | Path | None = None,
        bind: bool | str = True, public: str | None = None, job_id: str | None = None, node_rank: int = 0,
        network: NetworkOptions | None = None,
    ) -> AsyncIterator[Runtime]:  # fmt: skip
        """A runtime on the running loop: no thread, no signal handler. Arguments as `start`."""
        runtime = cls._make(name, key, socket_dir, bind, public, job_id, node_rank, network, None)
        try:
            yield runtime
        finally:
            await runtime._drained()
            runtime.close()

    @classmethod
    def join(
        cls, address: str, key_file: str | Path | None = None, *, key: bytes | None = None, name: str = "service",
        socket_dir: str | Path | None = None, bind: bool | str = False, network: NetworkOptions | None = None,
        timeout_s: float = 10.0,
    ) -> Joining[Runtime]:  # fmt: skip
        """Join a running job from a service of your own: on the running loop, as `open` does, or, in a program without
        one, with a loop on a thread, as `start` does::

            async with Runtime.join(address, key_file) as runtime:
                text = await RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt)

            with Runtime.join(address, key_file) as runtime:
                text = RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt).result()

        The job's roles can be called until the block is left; members that restart or end are followed. The job
        neither waits for the service nor notices its end.

        Args:
            address: of the job's master, as ``rlmesh ps JOB`` shows it.
            key_file: the job's key, as ``rlmesh ps JOB`` shows it; else the file that ``RLMESH_KEY_FILE`` names.
            key: the key itself, in place of a file.
            name: what members and logs call the service.
            socket_dir, bind, network: as for `open`; by default the service only calls.
            timeout_s: how long the job may take to answer.

        Raises, when the block is entered:
            UsageError: the key file cannot be used.
            AuthenticationFailed: it is another job's.
            PeerLost: no job answers.
        """
        from rlmesh.runtime.connections.joining import Joining

        make = {"name": name, "socket_dir": socket_dir, "bind": bind, "network": network}
        return Joining(cls.open, cls.start, address, lambda: key or find_key(key_file), timeout_s, make)

    @classmethod
    def _make(
        cls, name: str, key: bytes | None, socket_dir: str | Path | None, bind: bool | str,
        public: str | None, job_id: str | None, node_rank: int, network: NetworkOptions | None,
        thread: LoopThread | None,
    ) -> Runtime:  # fmt: skip
        require("Runtime(name=…)", name, str, "text")
        require("Runtime(socket_dir=…)", socket_dir, str | Path | None, "the path of a folder")
        if "\0" in str(socket_dir):
            raise UsageError(f"Runtime(socket_dir={socket_dir!r}): a path has no zero byte")
        require("Runtime(bind=…)", bind, bool | str, "True, False or an address")
        require("Runtime(public=…)", public, str | None, "an address")
        require("Runtime(job_id=…)", job_id, str | None, "text")
        if job_id is not None and not _JOB_ID.fullmatch(job_id):
            raise UsageError(f"Runtime(job_id={job_id!r:.80}): it is 1 to 80 letters, digits, '.', '_' or '-'")
        require("Runtime(node_rank=…)", node_rank, int, "a number")
        require("Runtime(network=…)", network, NetworkOptions | None, "NetworkOptions")
        runtime = cls(name, key, asyncio.get_running_loop(), job_id, node_rank, network, embedded=thread is None)
        try:
            if bind:
                address = bind if isinstance(bind, str) else local_address(socket_dir)
                runtime.endpoint = runtime._authenticator.endpoint = runtime._transport(address).bind(address)
            if public:
                runtime.public_endpoint = runtime._transport(public).bind(public)
        except BaseException:
            runtime._close_transports(0)
            raise
        runtime._loop_ident = threading.get_ident()
        if runtime.network.busy_poll_s > 0:
            runtime._calls.busy_poll = BusyPoll(runtime._loop_ident, runtime.network.busy_poll_s)
        forked.forget_in_children(runtime)
        if thread is not None:
            runtime._thread_owner = thread
            with_threads.add(runtime)
        register_loop_thread(name)
        turn_loops[runtime._loop_ident] = runtime._loop
        runtime._meter.add(threading.get_native_id())
        return runtime

    def close(self) -> None:
        """End pending calls, send what is queued for at most a second, release everything. Idempotent. In a forked
        child there is nothing to close."""
        if self._closed:
            return
        with self._opening:
            if self._closed:
                return
            self._closed = True
        with_threads.discard(self)
        if default_runtime_or_none() is self:
            set_default_runtime(None)
        self._dispatcher.ending = True
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
        turn_loops.pop(self._loop_ident, None)
        self._meter.close()
        self.strangers.settle(at_the_end=True)

    def forked(self) -> None:
        """In a forked child: whatever is asked of the runtime raises; nothing of it talks, removes files or ends."""
        self._closed = self._dispatcher.forked = True
        with_threads.discard(self)
        self._posts.forked()
        for thread in filter(None, (self._thread_owner, self._user)):
            thread.posts.forked()
        for transport in self._transports.values():
            transport.forked()
        whose: Any = forked.Inherited(self.name)
        self._calls = self._dispatcher = self._shm = self._bulk = whose

    async def _drained(self) -> None:
        """Let packets of this turn and what is queued go out, without standing in the loop's way."""
        if self._closed:
            return
        await asyncio.sleep(0)
        for _ in range(int(_LINGER_S / _DRAIN_POLL_S)):
            if all(transport.idle() for transport in self._transports.values()):
                break
            await asyncio.sleep(_DRAIN_POLL_S)

    def _close_on_loop(self) -> None:
        self._posts.run()
        self._dispatcher.results.close()
        for channel in self._incoming.values():
            channel.flush()
        self._calls.close()
        self._close_transports(_EMBEDDED_LINGER_S if self._embedded else _LINGER_S)
        self._shm.close()

    def _transport(self, address: str) -> Transport:
        scheme, factory = self.network.factory(address)
        found = self._transports.get(scheme)
        if found is None:
            found = self._transports[scheme] = factory(self, self._loop, self.post, self._key)
            for thread_id in thread_ids_named("ZMQbg"):
                self._meter.add(thread_id)
        return found

    def _connect(self, endpoint: str) -> Link:
        return self._transport(endpoint).connect(endpoint)

    def _close_transports(self, linger_s: float) -> None:
        for transport in self._transports.values():
            transport.close(linger_s)

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
        functions: Mapping[str, Callable[..., Any]] | None = None, inline: bool = False, fused: bool = False,
    ) -> None:  # fmt: skip
        """Let peers call the ``@rpc`` methods of ``obj`` (and ``functions``, by name) under ``name``.

        Args:
            fused: run serial ``def`` methods on the thread of the member that was served first.
            inline: run ``async def`` methods on the runtime's own loop; always so where it is embedded.
        """
        served = Served(
            name, incarnation, {**(functions or {}), **exported(obj)}, inline=inline or self._embedded,
            beside=self._main if fused else None,
        )  # fmt: skip
        if self._main is None and not name.startswith("@"):
            self._main = served
        if name in self._expected:
            self._expected.discard(name)
            served.executor.hold()
        self._dispatcher.serve(served)
        self._on_loop(self._dispatcher.release, name)

    def wrap_method(self, name: str, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put what ``make`` makes of a served method in its place; for rehearsals of failures.

        Raises:
            MethodNotFound: nothing of that name is served here.
        """
        for served in self._dispatcher.served():
            if served.name == name:
                found = served.find(method)
                found.function = make(found.function)
                return
        raise MethodNotFound(f"this process does not serve {name!r}")

    def methods_of(self, name: str) -> tuple[str, ...]:
        """What is exported under a name that is served here; empty if nothing is."""
        found = [served for served in self._dispatcher.served() if served.name == name]
        return tuple({*found[0].methods, *exported_functions()}) if found else ()

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

    def submit_main(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread of `run_main`, after the methods that are queued. From any thread."""
        self._main_executor().submit(work)

    def run_waiting_main(self) -> None:
        """Within `main_busy`, on its thread: run the methods that only the main thread may run and that wait for it."""
        if self._main is not None:
            self._main.executor.run_waiting()

    def main_busy(self) -> AbstractContextManager[None]:
        """While user code occupies the thread of `run_main`: ``def`` methods run on a second thread."""
        return self._main_executor().busy()

    def _main_executor(self) -> SerialExecutor:
        if self._main is None:
            raise UsageError("serve a member before run_main(): there is nothing whose methods could run")
        return self._main.executor

    def note_methods_on(self, board: Board) -> None:
        """Note there which methods begin, for those who look from outside."""
        self._dispatcher.board = board

    @contextmanager
    def occupied(self, what: str) -> Iterator[None]:
        """While user code that is no method, such as ``A:0.setup()``, has the main thread."""
        self._main_work = (what, clock.now())
        try:
            yield
        finally:
            self._main_work = ("", 0.0)

    def blocked(self, older_s: float) -> BlockedCalls:
        """What runs here and waits for answers, and what is queued behind it, if any call has been here for
        ``older_s`` seconds. From any thread."""
        from rlmesh.runtime.serving.wait_report import blocked_calls

        what, since = self._main_work
        age_s = clock.now() - since if what else 0.0
        return blocked_calls(self._dispatcher, self.name, (what, age_s), time.perf_counter_ns(), older_s)

    def refuse_queued(self, calls: Collection[CallKey], text: str) -> None:
        """Let calls that have not begun fail with `WouldDeadlock`. From any thread."""
        from rlmesh.runtime.serving.wait_report import refuse_queued

        self._on_loop(refuse_queued, self._dispatcher, self._loop, frozenset(calls), text)

    @property
    def key(self) -> bytes:
        """The secret that peers must hold."""
        return self._key

    def set_address_book(self, book: AddressBook) -> None:
        self._on_loop(self._calls.set_book, book.seen_from(self._node_rank))

    def member_lost(self, info: MemberExit) -> None:
        """Tell the caller's side that a member's process ended: its calls fail now, later ones at once."""
        self._on_loop(self._calls.member_lost, info)

    @property
    def job_ends(self) -> Callable[[], JobEnd | None]:
        """Says why the job is ending, if it is and that is known here; for any thread. It can be replaced."""
        return self._calls.job_end

    @job_ends.setter
    def job_ends(self, say: Callable[[], JobEnd | None]) -> None:
        self._calls.job_end = say

    def end_calls(self, why: str) -> None:
        """End the calls that have no answer: nobody is left who could give one."""

        def end() -> None:
            for call in list(self._calls.pending()):
                self._calls._fail(call, call.lost(why, "maybe" if call.peer is not None else "no"))

        self._on_loop(end)

    def on_thread(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop that `start` made, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

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
        """Run ``fn`` on the runtime's loop, from any thread, soon."""
        self._posts.put(fn, *args)

    def post_to_user(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run ``fn`` on the loop of ``async def`` methods, from any thread: soon, or at once where that loop runs."""
        user = self._user or self._start_user()
        if user is None:
            return  # It is closed, and nobody waits for the method any more.
        if user.is_here():
            fn(*args)
        else:
            user.posts.put(fn, *args)

    def _start_user(self) -> LoopThread | None:
        with self._opening:
            if self._user is None and not self._closed:
                self._user = LoopThread(f"rlmesh-user-{self.name}")
            return self._user

    def system_exit(self, code: object) -> None:
        if self.exit_hook is not None:
            self.exit_hook(code)
        else:
            logger.warning("%s: a served method called sys.exit(%r); it was answered as an error", self.name, code)
