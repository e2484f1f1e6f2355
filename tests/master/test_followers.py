"""Services that joined: a question waits at the master until there is an answer."""

from __future__ import annotations

import asyncio
import time

from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.jobspec import JobSpec
from rlmesh.master.monitoring.subscribers import Subscribers
from rlmesh.placement.demand import JobDemand
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.testing import VirtualLoop

SPEC = JobSpec("j-1", "j", "/runs/j", (), JobDemand((), ()), call_timeout_s=7.0)
EXIT = ExitInfo("A", 0, 0, 11, 1, None, time.time())


def book(version: int) -> AddressBook:
    return AddressBook(version, (MemberAddress("A", 0, version - 1, f"unix:///{version}"),))


def test_a_question_waits_until_something_changes() -> None:
    async def main() -> None:
        subscribers = Subscribers(SPEC)
        loop = asyncio.get_running_loop()
        began = loop.time()
        view = await subscribers.changes(0, 0, 5.0)
        assert loop.time() - began == 5.0 and view.book.version == 0, "nothing came: the same again"
        news: list[ev.Action] = [ev.AskToStop((), "x"), ev.PublishBook(book(1))]
        loop.call_later(3.0, subscribers.note, news)
        first, second = await asyncio.gather(subscribers.changes(0, 0, 60.0), subscribers.changes(0, 0, 60.0))
        assert loop.time() - began == 8.0 and first == second
        assert (first.job_id, first.call_timeout_s, first.book.version, first.exits_seen) == ("j-1", 7.0, 1, 0)
        loop.call_later(1.0, subscribers.note, [ev.AnnounceLoss(EXIT)])
        view = await subscribers.changes(1, 0, 60.0)
        assert view.exits == (EXIT,) and view.exits_seen == 1 and loop.time() - began == 9.0
        assert (await subscribers.changes(0, 0, 60.0)).exits == (EXIT,), "who comes late is told at once"
        began = loop.time()
        assert (await subscribers.changes(1, 1, 10_000.0)).exits == ()
        assert loop.time() - began == 60.0, "no wait without a limit"

    with VirtualLoop() as loop:
        loop.run(main())
