"""Joins a running job from outside: a service gets the members' addresses from the job's master and follows changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rlmesh.errors import CallError, CallTimeout, PeerLost
from rlmesh.runtime.argument_types import refuse_inside_loop
from rlmesh.runtime.calling.peer_table import JobEnd
from rlmesh.runtime.connections.address_book import AddressBook, MemberExit
from rlmesh.runtime.process import clock

if TYPE_CHECKING:
    from rlmesh.runtime.calling.outbound import Outbound

logger = logging.getLogger(__name__)

MASTER = "@master"
FOLLOW_WAIT_S = 20.0
"""Longest time that a request for changes waits at the master."""
_ANSWER_S = 10.0
_LAST_WAIT_S = 0.1
MASTER_AWAY_S = 60.0
"""Time without a master after which the job is over; a master that dies is restarted within seconds."""
_RETRY_S = 0.5
_ENDS_S = 2.0
"""Time without a master after which a job that announced its end is over."""
_ENTER_MARGIN_S = 30.0


class ClientRuntime(Protocol):
    """The attributes and methods of a runtime that `Follower` uses."""

    outbound: Outbound

    def peer(self, name: str, endpoint: str) -> Any: ...

    def set_address_book(self, book: AddressBook) -> None: ...

    def member_lost(self, info: MemberExit) -> None: ...

    def end_calls(self, why: str) -> None: ...

    def on_thread(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any: ...

    def close(self) -> None: ...


R = TypeVar("R", bound=ClientRuntime)


@dataclass(frozen=True, slots=True)
class MembershipUpdate:
    """A job's members, and the members that ended since the last request, as a service follows them.

    ``call_timeout_s`` is the job's default. ``exits_seen`` counts the exits up to this update. ``ends`` is the reason
    why the job is ending; empty while it runs.
    """

    job_id: str
    job_name: str
    call_timeout_s: float
    book: AddressBook
    exits: tuple[MemberExit, ...]
    exits_seen: int
    ends: str = ""


async def first_update(runtime: ClientRuntime, address: str, timeout_s: float) -> MembershipUpdate:
    """The first update of a job that names its members, or the reason of its end.

    Raises:
        PeerLost: no job answers at the address.
        AuthenticationFailed: the job has another key.
        TimeoutError: the job answers, and has no members in time.
    """
    master = runtime.peer(MASTER, address).options(timeout_s=timeout_s)
    deadline = clock.now() + timeout_s
    while True:
        wait_s = max(_LAST_WAIT_S, (deadline - clock.now()) / 2)
        try:
            view: MembershipUpdate = await master.call("follow", 0, 0, min(wait_s, FOLLOW_WAIT_S))
        except (CallTimeout, PeerLost) as error:
            raise PeerLost(
                f"no job answers at {address}: {error}. `rlmesh ps JOB` shows the address and the key file of a job "
                "that runs here", method="follow", executed=error.executed,
            ) from error  # fmt: skip
        if view.book.members or view.ends:
            return view
        if clock.now() >= deadline:
            raise TimeoutError(
                f"job {view.job_name} has no members after {timeout_s:g} s: it may wait for nodes or devices; "
                "`rlmesh status` shows it. Join later, or with a longer timeout_s"
            )


class Follower:
    """Keeps a runtime's address book equal to the master's, by a task on the running loop."""

    def __init__(self, runtime: ClientRuntime, address: str, view: MembershipUpdate) -> None:
        self._runtime, self._address, self._view = runtime, address, view
        self._task: asyncio.Task[None] | None = None
        self._ends = False

    async def __aenter__(self) -> Follower:
        self._take(self._view)
        self._task = asyncio.create_task(self._follow(), name=f"rlmesh-follow-{self._view.job_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        master = self._runtime.peer(MASTER, self._address).options(timeout_s=FOLLOW_WAIT_S + _ANSWER_S)
        away_since: float | None = None
        while True:
            view = self._view
            # A restarted master may count exits anew, so everything is requested again.
            version, seen = (view.book.version, view.exits_seen) if away_since is None else (0, 0)
            try:
                self._take(await master.call("follow", version, seen, FOLLOW_WAIT_S))
                away_since = None
            except CallTimeout:
                logger.warning("the master of job %s does not answer; trying again", view.job_id)
            except CallError as error:
                now = clock.now()
                if away_since is None:
                    away_since = now
                    level = logging.DEBUG if view.ends or self._runtime.outbound.peers.job_end() else logging.WARNING
                    logger.log(level, "the master of job %s is away; trying again: %s", view.job_id, error)
                if now - away_since > MASTER_AWAY_S or (view.ends and now - away_since > _ENDS_S):
                    why = view.ends or f"job {view.job_name} is over: its master has been away for {MASTER_AWAY_S:g} s"
                    logger.info("job %s is no longer followed: %s", view.job_id, error)
                    _announce_end(self._runtime, JobEnd(why))
                    self._runtime.end_calls(why)
                    return
                await asyncio.sleep(_RETRY_S)
            if self._view.ends:
                await asyncio.sleep(_RETRY_S)  # The master answers at once from now on.

    def _take(self, view: MembershipUpdate) -> None:
        self._view = view
        if view.ends and not self._ends:
            self._ends = True
            _announce_end(self._runtime, JobEnd(view.ends))
        self._runtime.set_address_book(view.book)
        for exit in view.exits:
            self._runtime.member_lost(exit)


def _announce_end(runtime: ClientRuntime, end: JobEnd) -> None:
    """Let the job's end explain lost members. A reason that ``job_end`` already gives is kept."""
    peers = runtime.outbound.peers
    before = peers.job_end
    peers.job_end = lambda: before() or end


class Joining(Generic[R]):
    """A runtime that calls a job's members within a block. Made by `Runtime.join`.

    ``async with`` uses the running loop, ``with`` a loop on its own thread.

    Args:
        open_here: makes a runtime on the running loop (`Runtime.open`).
        start: makes a runtime with its own thread (`Runtime.start`).
    """

    def __init__(
        self, open_here: Callable[..., AbstractAsyncContextManager[R]], start: Callable[..., R], address: str,
        find_key: Callable[[], bytes], timeout_s: float, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._open_here, self._start = open_here, start
        self._address, self._find_key = address, find_key
        self._timeout_s, self._options = timeout_s, options
        self._stack = AsyncExitStack()
        self._runtime: R | None = None

    def _options_for(self, view: MembershipUpdate) -> dict[str, Any]:
        # A socket of the first node leads to that node's other sockets; over the network, to the nodes' TCP addresses.
        return {**self._options, "job_id": view.job_id, "node_rank": -1 if self._address.startswith("tcp:") else 0}

    def _scout_options(self) -> dict[str, Any]:
        return {"name": self._options["name"], "network": self._options["network"], "bind": False}

    async def _follow(self, runtime: ClientRuntime, view: MembershipUpdate) -> None:
        runtime.outbound.default_timeout_s = view.call_timeout_s
        await self._stack.enter_async_context(Follower(runtime, self._address, view))

    async def __aenter__(self) -> R:
        key = self._find_key()
        async with self._open_here(key=key, **self._scout_options()) as scout:
            view = await first_update(scout, self._address, self._timeout_s)
        async with AsyncExitStack() as opening:
            runtime = await opening.enter_async_context(self._open_here(key=key, **self._options_for(view)))
            await self._follow(runtime, view)
            opening.push_async_exit(self._stack)
            self._stack = opening.pop_all()
        return runtime

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def __enter__(self) -> R:
        refuse_inside_loop("Runtime.join()", "async with Runtime.join()")
        key = self._find_key()
        limit_s = self._timeout_s + _ENTER_MARGIN_S
        with closing(self._start(key=key, **self._scout_options())) as scout:
            view = scout.on_thread(first_update(scout, self._address, self._timeout_s), limit_s)
        runtime = self._start(key=key, **self._options_for(view))
        try:
            runtime.on_thread(self._follow(runtime, view), limit_s)
        except BaseException:
            runtime.close()
            raise
        self._runtime = runtime
        return runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        runtime = self._runtime
        if runtime is not None:
            try:
                runtime.on_thread(self._stack.aclose(), _ENTER_MARGIN_S)
            finally:
                runtime.close()
