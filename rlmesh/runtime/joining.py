"""Joining a running job from outside: a service asks the job's master where the members are, and follows them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rlmesh.errors import CallError, CallTimeout, PeerLost
from rlmesh.runtime import clock
from rlmesh.runtime.address import AddressBook

if TYPE_CHECKING:
    from rlmesh.job.status import ExitInfo
    from rlmesh.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

MASTER = "@master"
FOLLOW_WAIT_S = 20.0
"""So long a question after changes waits at the master."""
_ANSWER_S = 10.0
MASTER_AWAY_S = 60.0
"""A master that dies is started again within seconds and adopts its job; after so long without one, the job is over."""
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class JobView:
    """What a service learns of a job: its members' addresses, and which of them ended since it asked before.

    ``call_timeout_s`` is the job's default. ``exits_seen`` counts the exits up to this view.
    """

    job_id: str
    job_name: str
    call_timeout_s: float
    book: AddressBook
    exits: tuple[ExitInfo, ...]
    exits_seen: int


async def ask(runtime: Runtime, address: str, timeout_s: float) -> JobView:
    """The first view of a job, once its members are known.

    Raises:
        PeerLost: no job answers there.
        AuthenticationFailed: the job has another key.
    """
    master = runtime.peer(MASTER, address).options(timeout_s=timeout_s)
    try:
        view: JobView = await master.call("follow", 0, 0, timeout_s / 2)
    except (CallTimeout, PeerLost) as error:
        raise PeerLost(
            f"no job answers at {address}: {error}. `rlmesh ps JOB` shows the address and the key file of a job that "
            "runs here", method="follow", executed=error.executed,
        ) from error  # fmt: skip
    return view


class Follower:
    """Keeps a runtime's address book as the master has it, by one task on the running loop."""

    def __init__(self, runtime: Runtime, address: str, view: JobView) -> None:
        self._runtime, self._address, self._view = runtime, address, view
        self._task: asyncio.Task[None] | None = None

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
                    logger.warning("the master of job %s is away; it is looked for: %s", view.job_id, error)
                if now - away_since > MASTER_AWAY_S:
                    logger.info("job %s is no longer followed: %s", view.job_id, error)
                    return
                await asyncio.sleep(_RETRY_S)

    def _take(self, view: JobView) -> None:
        self._view = view
        self._runtime.set_address_book(view.book)
        for exit in view.exits:
            self._runtime.member_lost(exit)
