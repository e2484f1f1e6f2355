"""Services that joined the job from outside: each asks for what changed, and its question waits until something did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlmesh.job.status import ExitInfo, first_cause
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext
from rlmesh.master.jobspec import JobSpec
from rlmesh.runtime.connections.address_book import AddressBook

if TYPE_CHECKING:
    from rlmesh.runtime.connections.joining import MembershipUpdate

LONGEST_WAIT_S = 60.0


def why_ends(context: JobContext) -> str:
    """Why a job is ending, in one line; empty as long as it goes on."""
    name = context.spec.job_name
    if context.stage in ("starting", "running"):
        return ""
    if context.failures:
        return first_cause(name, context.failures)
    if context.ends_as == "stopped":
        return f"job {name} was stopped: {context.note.removeprefix('stopped: ')}"
    return f"job {name} has ended: the roles that drive it are done"


class Followers:
    """Answers for one job."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._book = AddressBook(0, ())
        self._exits: list[ExitInfo] = []
        self._changed = asyncio.Event()
        self._ends = ""

    def note(self, actions: Iterable[ev.Action], ends: str = "") -> None:
        """Take in what members are told too. ``ends``: why the job is ending; empty if it is not."""
        changed = ends != self._ends
        self._ends = ends
        for action in actions:
            if isinstance(action, ev.PublishBook):
                self._book, changed = action.book, True
            elif isinstance(action, ev.AnnounceLoss):
                self._exits.append(action.exit)
                changed = True
        if changed:
            self._changed.set()
            self._changed = asyncio.Event()

    async def changes(self, version: int, exits_seen: int, wait_s: float) -> MembershipUpdate:
        """What is newer than version ``version`` of the address book and the first ``exits_seen`` exits; the same
        again if nothing came within ``wait_s`` seconds. At once if the job is ending."""
        try:
            async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)):
                while not self._ends and self._book.version <= version and len(self._exits) <= exits_seen:
                    await self._changed.wait()
        except TimeoutError:
            pass
        spec, exits = self._spec, tuple(self._exits[max(0, exits_seen) :])
        seen = len(self._exits)
        from rlmesh.runtime.connections.joining import MembershipUpdate

        return MembershipUpdate(spec.job_id, spec.job_name, spec.call_timeout_s, self._book, exits, seen, self._ends)
