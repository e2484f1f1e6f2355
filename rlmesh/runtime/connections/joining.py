"""Joining a running job from outside: a service asks the job's master where the members are, and follows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlmesh.errors import CallError, CallTimeout, PeerLost
from rlmesh.runtime.argument_types import refuse_inside_loop
from rlmesh.runtime.calling.peer_table import JobEnd
from rlmesh.runtime.connections.address_book import AddressBook, MemberExit
from rlmesh.runtime.process import clock

if TYPE_CHECKING:
    from rlmesh.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

MASTER = "@master"
FOLLOW_WAIT_S = 20.0
"""So long a question after changes waits at the master."""
_ANSWER_S = 10.0
MASTER_AWAY_S = 60.0
"""A master that dies is started again within seconds and adopts its job; after so long without one, the job is over."""
_RETRY_S = 0.5
_ENDS_S = 2.0
"""A job that said that it ends is over when its master has been away for so long."""
_ENTER_MARGIN_S = 30.0


@dataclass(frozen=True, slots=True)
class MembershipUpdate:
    """What a service learns of a job: its members' addresses, and which of them ended since it asked before.

    ``call_timeout_s`` is the job's default. ``exits_seen`` counts the exits up to this view. ``ends`` says why the job
    is ending; it is empty as long as it goes on.
    """

    job_id: str
    job_name: str
    call_timeout_s: float
    book: AddressBook
    exits: tuple[MemberExit, ...]
    exits_seen: int
    ends: str = ""


async def ask(runtime: Runtime, address: str, timeout_s: float) -> MembershipUpdate:
    """The first view of a job, once its members are known.

    Raises:
        PeerLost: no job answers there.
        AuthenticationFailed: the job has another key.
    """
    master = runtime.peer(MASTER, address).options(timeout_s=timeout_s)
    try:
        view: MembershipUpdate = await master.call("follow", 0, 0, timeout_s / 2)
    except (CallTimeout, PeerLost) as error:
        raise PeerLost(
            f"no job answers at {address}: {error}. `rlmesh ps JOB` shows the address and the key file of a job that "
            "runs here", method="follow", executed=error.executed,
        ) from error  # fmt: skip
    return view


class Follower:
    """Keeps a runtime's address book as the master has it, by one task on the running loop."""

    def __init__(self, runtime: Runtime, address: str, view: MembershipUpdate) -> None:
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
            # A master that was away may count exits anew: it is asked for everything it knows.
            version, seen = (view.book.version, view.exits_seen) if away_since is None else (0, 0)
            try:
                self._take(await master.call("follow", version, seen, FOLLOW_WAIT_S))
                away_since = None
            except CallTimeout:
                logger.warning("the master of job %s does not answer; it is asked again", view.job_id)
            except CallError as error:
                now = clock.now()
                if away_since is None:
                    away_since = now
                    level = logging.DEBUG if view.ends or self._runtime.job_ends() else logging.WARNING
                    logger.log(level, "the master of job %s is away; it is looked for: %s", view.job_id, error)
                if now - away_since > MASTER_AWAY_S or (view.ends and now - away_since > _ENDS_S):
                    why = view.ends or f"job {view.job_name} is over: its master has been away for {MASTER_AWAY_S:g} s"
                    logger.info("job %s is no longer followed: %s", view.job_id, error)
                    tell_end(self._runtime, JobEnd(why))
                    self._runtime.end_calls(why)
                    return
                await asyncio.sleep(_RETRY_S)
            if self._view.ends:
                await asyncio.sleep(_RETRY_S)  # Its master answers at once from now on.

    def _take(self, view: MembershipUpdate) -> None:
        self._view = view
        if view.ends and not self._ends:
            self._ends = True
            tell_end(self._runtime, JobEnd(view.ends))
        self._runtime.set_address_book(view.book)
        for exit in view.exits:
            self._runtime.member_lost(exit)


def tell_end(runtime: Runtime, end: JobEnd) -> None:
    """The job is ending: lost members are the effect of that. Whoever started the job may know more."""
    before = runtime.job_ends
    runtime.job_ends = lambda: before() or end


class Joining:
    """A runtime that calls a job's members, as long as a block lasts: ``async with`` on the running loop, ``with`` on a
    thread of its own. Made by `Runtime.join`."""

    def __init__(
        self, make: type[Runtime], address: str, find_key: Callable[[], bytes], timeout_s: float,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._make, self._address, self._find_key = make, address, find_key
        self._timeout_s, self._options = timeout_s, options
        self._stack = AsyncExitStack()
        self._runtime: Runtime | None = None

    def _rest(self, view: MembershipUpdate) -> dict[str, Any]:
        # Through a socket of the first node it reaches that node's others; over the network, what all nodes offer.
        return {**self._options, "job_id": view.job_id, "node_rank": -1 if self._address.startswith("tcp:") else 0}

    def _scout(self) -> dict[str, Any]:
        return {"name": self._options["name"], "network": self._options["network"], "bind": False}

    async def _follow(self, runtime: Runtime, view: MembershipUpdate) -> None:
        runtime.default_timeout_s = view.call_timeout_s
        await self._stack.enter_async_context(Follower(runtime, self._address, view))

    async def __aenter__(self) -> Runtime:
        key = self._find_key()
        async with self._make.open(key=key, **self._scout()) as scout:
            view = await ask(scout, self._address, self._timeout_s)
        async with AsyncExitStack() as opening:
            runtime = await opening.enter_async_context(self._make.open(key=key, **self._rest(view)))
            await self._follow(runtime, view)
            opening.push_async_exit(self._stack)
            self._stack = opening.pop_all()
        return runtime

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def __enter__(self) -> Runtime:
        refuse_inside_loop("Runtime.join()", "async with Runtime.join()")
        key = self._find_key()
        limit_s = self._timeout_s + _ENTER_MARGIN_S
        with self._make.start(key=key, **self._scout()) as scout:
            view = scout.on_thread(ask(scout, self._address, self._timeout_s), limit_s)
        runtime = self._make.start(key=key, **self._rest(view))
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
