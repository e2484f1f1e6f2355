"""`Runtime`: one endpoint of one process. Opens and closes everything that calls need."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlmesh.errors import MethodNotFound, UsageError
from rlmesh.runtime.activity import RuntimeActivity
from rlmesh.runtime.argument_types import require
from rlmesh.runtime.calling.busy_poll import BusyPoll
from rlmesh.runtime.calling.call_stats import RunQueueMeter, own_run_queue_since_last_ns
from rlmesh.runtime.calling.calls import Calls
from rlmesh.runtime.calling.outbound import Outbound
from rlmesh.runtime.connections.address_book import AddressBook, MemberExit
from rlmesh.runtime.connections.channel import turn_loops
from rlmesh.runtime.connections.handshake import Authenticator
from rlmesh.runtime.connections.inbound import Inbound
from rlmesh.runtime.connections.network import NetworkOptions, options_of_environment
from rlmesh.runtime.connections.security import check_key, find_key, make_key
from rlmesh.runtime.connections.shm_transfer import ShmTransfer
from rlmesh.runtime.connections.transports import Transports
from rlmesh.runtime.future import register_loop_thread, unregister_loop_thread
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import forked
from rlmesh.runtime.process.loops import LoopThread, Posts, with_threads
from rlmesh.runtime.rpc import exported, exported_functions
from rlmesh.runtime.serving.activity_board import Board
from rlmesh.runtime.serving.dispatch import Dispatcher
from rlmesh.runtime.serving.executors import SerialExecutor
from rlmesh.runtime.serving.served_objects import Served
from rlmesh.runtime.transport.base import local_address
from rlmesh.wire.envelope import ANY_INCARNATION

if TYPE_CHECKING:
    from rlmesh.runtime.connections.joining import Joining

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_CALL_TIMEOUT_S = 1800.0
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,80}")
_LINGER_S = 1.0
_DRAIN_POLL_S = 0.005
_EMBEDDED_LINGER_S = 0.1
"""The linger time of a runtime on a service's own loop, which is blocked for that long."""


class Runtime:
    """Calls served objects of other processes and serves objects of this one.

    `start` gives a runtime with a loop on a thread of its own, for scripts and workers; `open` one on the
    running loop, for services.

    Attributes:
        name: this process's name, for peers and logs.
        key: the secret that peers must hold.
        endpoint: the address at which this process listens; None if it only calls.
        public_endpoint: the address for processes of other nodes, in a job of several nodes.
        outbound: the calls that this process makes.
        inbound: the packets that this process receives.
        activity: what this process does and waits for.
        strangers: the peers that were rejected.
        exit_hook: called with ``SystemExit.code`` when a served method calls ``sys.exit``.
        on_close: called with this runtime when it is closed.
    """

    def __init__(
        self, name: str, key: bytes | None, loop: asyncio.AbstractEventLoop, job_id: str | None,
        node_rank: int = 0, network: NetworkOptions | None = None, *, embedded: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.endpoint: str | None = None
        self.public_endpoint: str | None = None
        self.exit_hook: Callable[[object], None] | None = None
        self.on_close: Callable[[Runtime], object] = lambda _: None
        self.network = network or options_of_environment()
        self.key = make_key() if key is None else check_key(key)
        self._node_rank, self._loop, self._embedded = node_rank, loop, embedded
        self._thread_owner: LoopThread | None = None
        self._loop_ident = 0
        self._posts = Posts(loop)
        self._meter = RunQueueMeter()
        self._authenticator = Authenticator(name, self.key)
        self.strangers = self._authenticator.strangers
        self._transports = Transports(self.network, loop, self.post, self.key, self._meter)
        self._shm = ShmTransfer(
            name, self.key, job_id, node_rank, loop, self.post,
            lambda: threading.get_ident() == self._loop_ident,
        )  # fmt: skip
        self._calls = Calls(loop, self._transports.connect, self._authenticator.begin, self.post, self._meter)
        self.outbound = Outbound(
            name, self._calls, self._shm, self.network, DEFAULT_CALL_TIMEOUT_S, self.post, loop.call_later
        )
        self._calls.fetch = self.fetch = self.outbound.fetch
        self.capture = self.outbound.capture
        self._dispatcher = Dispatcher(self, loop)
        self.outbound.results = self._dispatcher.results
        self.inbound = Inbound(
            name, loop, self.post, self.network, self.key, self._calls, self._dispatcher, self._shm,
            self._authenticator, self._transports,
        )  # fmt: skip
        self._transports.receiver = self.inbound
        self.watch_backlog = self.inbound.watch_backlog
        self.activity = RuntimeActivity(name, self._calls, self._dispatcher, loop, self.post)
        self._user: LoopThread | None = None
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
        """Start a runtime with a loop on a thread of its own; close it with `close` or a ``with`` block.

        Args:
            name: this process's name, for peers and logs.
            key: the job's secret; None makes one, so that only this process's own peers know it.
            socket_dir: private directory (mode 0700) for the socket; None listens on loopback TCP.
            bind: False for a process that only calls; text for an address of your choice.
            public: a TCP address to listen at as well, for processes of other nodes.
            job_id, node_rank: parts of the names of shared memory. By them the node's guardian, which cleans up after
                crashes, finds leftovers.
            network: limits and transports; None takes them from the environment.
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
        """Open a runtime on the running loop: no thread, no signal handler. Arguments as for `start`."""
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
        """Join a running job from a service of your own, on the running loop as `open`, or, in a program without a
        running loop, with a loop on a thread as `start`::

            async with Runtime.join(address, key_file) as runtime:
                text = await RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt)

            with Runtime.join(address, key_file) as runtime:
                text = RoleGroup("ROLLOUT", runtime=runtime).call_any("generate", prompt).result()

        The job's roles can be called until the block is left; the runtime follows members that restart or end. The job
        neither waits for the service nor notices its end.

        Args:
            address: the address of the job's master, as ``rlmesh ps JOB`` shows it.
            key_file: the file with the job's key, as ``rlmesh ps JOB`` shows it; None takes the file that
                ``RLMESH_KEY_FILE`` names.
            key: the key itself, in place of a file.
            name: the service's name, for members and logs.
            socket_dir, bind, network: as for `open`; by default the service only calls.
            timeout_s: seconds that the job may take to answer, and to have members.

        Raises, when the block is entered:
            UsageError: the key file cannot be used.
            AuthenticationFailed: the key is another job's.
            PeerLost: no job answers.
            TimeoutError: the job has no members in time.
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
                runtime.endpoint = runtime._authenticator.endpoint = runtime._transports.bind(address)
                runtime.outbound.own_endpoints.add(runtime.endpoint)
            if public:
                runtime.public_endpoint = runtime._transports.bind(public)
                runtime.outbound.own_endpoints.add(runtime.public_endpoint)
        except BaseException:
            runtime._transports.close(0)
            raise
        runtime._loop_ident = threading.get_ident()
        if runtime.network.busy_poll_s > 0:
            calls = runtime._calls
            calls.busy_poll = BusyPoll(
                runtime._loop_ident, runtime.network.busy_poll_s, calls.peers.is_alone, calls.on_reply
            )
        forked.forget_in_children(runtime)
        if thread is not None:
            runtime._thread_owner = thread
            with_threads.add(runtime)
        register_loop_thread(name)
        turn_loops[runtime._loop_ident] = runtime._loop
        runtime._meter.add(threading.get_native_id())
        return runtime

    def close(self) -> None:
        """Fail pending calls, send what is queued for at most a second, release everything.

        May be called more than once. Does nothing in a forked child.
        """
        if self._closed:
            return
        with self._opening:
            if self._closed:
                return
            self._closed = True
        with_threads.discard(self)
        self.on_close(self)
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
        """In a forked child: let all requests to the runtime raise. The child's copy sends nothing, removes no file and
        ends no thread."""
        self._closed = self._dispatcher.forked = True
        with_threads.discard(self)
        self._posts.forked()
        for thread in filter(None, (self._thread_owner, self._user)):
            thread.posts.forked()
        self._transports.forked()
        inherited: Any = forked.Inherited(self.name)
        self.outbound.forked(inherited)
        self.inbound.forked(inherited)
        self._calls = self._dispatcher = self._shm = self.activity = inherited

    async def _drained(self) -> None:
        """Wait until the packets of this turn and queued ones have left, without blocking the loop."""
        if self._closed:
            return
        await asyncio.sleep(0)
        for _ in range(int(_LINGER_S / _DRAIN_POLL_S)):
            if self._transports.idle():
                break
            await asyncio.sleep(_DRAIN_POLL_S)

    def _close_on_loop(self) -> None:
        self._posts.run()
        self._dispatcher.results.close()
        for channel in self.inbound.channels.values():
            channel.flush()
        self._calls.close()
        self._transports.close(_EMBEDDED_LINGER_S if self._embedded else _LINGER_S)
        self._shm.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Calling.

    def peer(self, name: str, endpoint: str, *, incarnation: int | None = None) -> MemberHandle:
        """A handle to an object that another process serves, by its address."""
        number = ANY_INCARNATION if incarnation is None else incarnation
        return MemberHandle(self.outbound, name, endpoint=endpoint, incarnation=number)

    def address_book(self) -> AddressBook:
        """The members of the job.

        Raises:
            UsageError: they are not known yet.
        """
        return self.outbound.address_book()

    # Serving.

    def expect(self, name: str) -> None:
        """Announce that ``name`` will be served here, its ``def`` methods by `run_main`. Calls that come before `serve`
        and `run_main` wait for them, until their deadlines."""
        self._expected.add(name)
        self._on_loop(self._dispatcher.expect, name)

    def serve(
        self, name: str, obj: object, *, incarnation: int = 0,
        functions: Mapping[str, Callable[..., Any]] | None = None, inline: bool = False, fused: bool = False,
    ) -> None:  # fmt: skip
        """Let peers call the ``@rpc`` methods of ``obj`` (and ``functions``, by name) under ``name``.

        Args:
            incarnation: the number of the member's start; calls for another incarnation are refused.
            inline: run ``async def`` methods on the runtime's own loop; always so in an embedded runtime.
            fused: run serial ``def`` methods on the thread of the member that was served first.
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
        """Replace a served method by ``make(method)``; for rehearsals of failures.

        Raises:
            MethodNotFound: no object of that name is served here, or it has no such method.
        """
        served = self._find_served(name)
        if served is None:
            raise MethodNotFound(f"this process does not serve {name!r}")
        found = served.find(method)
        found.function = make(found.function)

    def methods_of(self, name: str) -> tuple[str, ...]:
        """The methods exported under a name; empty if the name is not served here."""
        served = self._find_served(name)
        return tuple({*served.methods, *exported_functions()}) if served is not None else ()

    def _find_served(self, name: str) -> Served | None:
        return next((served for served in self._dispatcher.served() if served.name == name), None)

    def unserve(self, name: str) -> None:
        """Stop serving ``name``; calls that run already end normally."""

        def drop() -> None:
            served = self._dispatcher.unserve(name)
            if served is not None:
                served.close()

        self._on_loop(drop)

    def run_main(self) -> None:
        """Run ``def`` methods of the first served member on the calling thread until `stop_main`."""
        self._main_executor().run(own_run_queue_since_last_ns)

    def stop_main(self, *, now: bool = False) -> None:
        """Let `run_main` return: after the queued methods, or with ``now`` after the one that runs."""
        self._main_executor().stop(now=now)

    def submit_main(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread of `run_main`, after the methods that are queued. From any thread."""
        self._main_executor().submit(work)

    def run_waiting_main(self) -> None:
        """Run the waiting methods that only the main thread may run. On that thread, within `main_busy`."""
        if self._main is not None:
            self._main.executor.run_waiting()

    def main_busy(self) -> AbstractContextManager[None]:
        """A context in which user code occupies the thread of `run_main`: ``def`` methods run on a second thread."""
        return self._main_executor().busy()

    def _main_executor(self) -> SerialExecutor:
        if self._main is None:
            raise UsageError("serve a member before run_main(): there is nothing whose methods could run")
        return self._main.executor

    def note_methods_on(self, board: Board) -> None:
        """Show the methods that run here on a board that other processes can read."""
        self._dispatcher.board = board

    # The job.

    def set_address_book(self, book: AddressBook) -> None:
        """Take a newer address book; calls that waited for an address in it go out."""
        self._on_loop(self._calls.set_book, book.seen_from(self._node_rank))

    def member_lost(self, info: MemberExit) -> None:
        """Fail the calls to a member whose process ended; later calls fail at once."""
        self._on_loop(self._calls.member_lost, info)

    def end_calls(self, why: str) -> None:
        """Fail the calls that have no answer: no process is left that could give one."""
        self._on_loop(self._calls.end_all, why)

    def on_thread(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop that `start` made, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # The parts of the runtime.

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
            return  # The runtime is closed, and no caller waits for the method any more.
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
        """Call `exit_hook`: a served method called ``sys.exit``."""
        if self.exit_hook is not None:
            self.exit_hook(code)
        else:
            logger.warning("%s: a served method called sys.exit(%r); it was answered as an error", self.name, code)
