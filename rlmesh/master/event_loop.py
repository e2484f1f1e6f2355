"""The master's event loop: decide on events, save the decisions, and only then carry them out.

So the next master knows everything that a dead one has begun: each order is in the store, together with the state in
which it was given, from before it goes out until it was carried out. Messages from an outbox are confirmed when they
are saved. A store that hangs delays orders by ``SAVE_WAIT_S`` at most; a store that fails does not delay them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.context import MemberId
from rlmesh.master.job_manager import JobManager
from rlmesh.master.state.persistence import Persistence
from rlmesh.master.state.snapshot import Snapshot

if TYPE_CHECKING:
    from rlmesh.job.status import MetricRecord
    from rlmesh.observe.files.metric_files import MetricsWriter

logger = logging.getLogger(__name__)

BATCH = 1000
SAVE_WAIT_S = 1.0
TAIL_RECORDS = 5000
"""Reports that a restarted master reads back, to recognise a report that was not confirmed before the restart."""


@dataclass(eq=False, slots=True)
class _Posted:
    event: ev.Event
    sender: str = ""
    number: int = 0
    saved: asyncio.Future[None] | None = None


class EventLoop:
    """Processes events in batches, on one asyncio loop.

    Args:
        manager: decides; works on the snapshot's context and decisions.
        persistence: the job's store.
        snapshot: the job's state, as the previous master left it.
        perform: carries out numbered orders, and calls ``carried_out`` for each.
        clock: seconds since the epoch.
    """

    def __init__(
        self, manager: JobManager, persistence: Persistence, snapshot: Snapshot,
        perform: Callable[[Iterable[tuple[int, ev.Action]]], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._manager, self._perform, self._clock = manager, perform, clock
        self._run_dir = Path(manager.context.spec.run_dir)
        self._queue: asyncio.Queue[_Posted] = asyncio.Queue()
        self._persistence = persistence
        self._writer: MetricsWriter | None = None
        self._unsaved = False
        self._snapshot = snapshot
        self._number = max(snapshot.orders, default=0)
        self._ordered_for: dict[int, tuple[ev.ProcessKey, ...]] = {}
        for number, order in snapshot.orders.items():
            self._note_processes(number, order)
        snapshot.masters.append((len(snapshot.masters) + 1, os.getpid(), clock()))
        self._recall_records()

    @property
    def store_trouble(self) -> str:
        """Reason why the job's state is not being saved; empty if it is."""
        return self._persistence.trouble

    @property
    def masters(self) -> int:
        """Number of masters that the job has had, including this one."""
        return len(self._snapshot.masters)

    # Incoming events

    def post(self, event: ev.Event) -> None:
        """Queue an event."""
        self._queue.put_nowait(_Posted(event))

    async def post_and_save(self, event: ev.Event) -> None:
        """Queue an event and wait until its consequences are saved."""
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Posted(event, saved=saved))
        await saved

    async def deliver(self, sender: str, first: int, messages: Sequence[ev.Event]) -> int:
        """Queue the messages of an outbox, each once; return the number of the last one when all are saved."""
        for number, event in enumerate(messages, first):
            self._queue.put_nowait(_Posted(event, sender, number))
        await self.post_and_save(ev.Tick())
        return first + len(messages) - 1

    # Processing

    def _recall_records(self) -> None:
        from rlmesh.observe.files.metric_files import METRICS_FILE, read_tail

        context = self._manager.context
        path = self._run_dir / METRICS_FILE
        count, records = read_tail(path, TAIL_RECORDS if self.masters > 1 else 0)
        if self.masters == 1:
            context.records_before = count
            return
        own = max(0, count - context.records_before)
        context.records = records[-own:] if own else []
        context.records_dropped = own - len(context.records)
        for record in context.records:
            self._snapshot.heard[record.sender] = max(self._snapshot.heard.get(record.sender, 0), record.number)

    def reissue(self) -> None:
        """Carry out again the orders that a previous master may not have carried out."""
        self._perform(list(self._snapshot.orders.items()))

    async def turn(self, wait_s: float) -> None:
        """Handle the queued events, or a tick if none comes within ``wait_s``."""
        try:
            batch = [await asyncio.wait_for(self._queue.get(), wait_s)]
        except TimeoutError:
            batch = [_Posted(ev.Tick())]
        while not self._queue.empty() and len(batch) < BATCH:
            batch.append(self._queue.get_nowait())
        now = self._clock()
        numbers: list[int] = []
        for posted in batch:
            if self._is_new(posted):
                event = self._numbered(posted)
                for action in self._manager.handle(event, now):
                    self._number += 1
                    numbers.append(self._number)
                    self._snapshot.orders[self._number] = action
                    self._note_processes(self._number, action)
        self._drop_replaced(numbers)
        await self._save()
        self._perform(
            [(number, self._snapshot.orders[number]) for number in numbers if number in self._snapshot.orders]
        )
        for posted in batch:
            if posted.saved is not None and not posted.saved.done():
                posted.saved.set_result(None)

    def _note_processes(self, number: int, order: ev.Action) -> None:
        match order:
            case ev.BeginRun(member):
                ids: tuple[MemberId, ...] = (member,)
            case ev.Spawn(members=ids) | ev.HoldSteps(members=ids):
                pass
            case _:
                return
        self._ordered_for[number] = tuple(self._manager.context.members[member].key for member in ids)

    def _drop_replaced(self, new: Sequence[int]) -> None:
        """Drop orders for processes that have been replaced since: carried out now, or again by the next master, they
        would be orders for the successors. ``new``: orders that were not given to anybody yet."""
        members = self._manager.context.members
        for number, keys in list(self._ordered_for.items()):
            gone = [key for key in keys if members[key[:2]].incarnation != key[2]]
            order = self._snapshot.orders[number]
            if not gone:
                continue
            if isinstance(order, ev.Spawn) and number in new:
                for key in gone:
                    never = ExitInfo(*key, 0, None, None, self._clock(), order.node_rank)
                    self.post(ev.MemberExited(order.node_rank, never))
            left = tuple(key for key in keys if key not in gone)
            if left and isinstance(order, ev.Spawn | ev.HoldSteps):
                self._ordered_for[number] = left
                self._snapshot.orders[number] = replace(order, members=tuple(key[:2] for key in left))
            else:
                self.carried_out(number)

    def _is_new(self, posted: _Posted) -> bool:
        if not posted.number:
            return True
        if posted.number <= self._snapshot.heard.get(posted.sender, 0):
            return False
        self._snapshot.heard[posted.sender] = posted.number
        return True

    def _numbered(self, posted: _Posted) -> ev.Event:
        event = posted.event
        if not isinstance(event, ev.Reported):
            return event
        record = replace(event.record, sender=posted.sender, number=posted.number)
        self._write(record)
        return ev.Reported(record)

    def _write(self, record: MetricRecord) -> None:
        if self._writer is None:
            from rlmesh.observe.files.metric_files import MetricsWriter

            self._writer = MetricsWriter(self._run_dir)
        self._writer.write(record)

    async def _save(self) -> None:
        try:
            rows = self._snapshot.rows()
        except Exception:  # a value's own __reduce__ may raise anything; the job goes on
            if not self._unsaved:
                logger.exception("the job's state cannot be saved; the job goes on, but does not outlive its master")
            self._unsaved = True
            return
        saved = self._persistence.save(rows)
        if saved.done():
            return
        began = time.monotonic()
        try:
            await asyncio.wait_for(asyncio.shield(saved), SAVE_WAIT_S)
        except TimeoutError:
            logger.warning("the job's state was not saved within %.1f s; the job goes on", time.monotonic() - began)

    def carried_out(self, number: int) -> None:
        """Mark an order as carried out; this is saved with the next batch."""
        self._snapshot.orders.pop(number, None)
        self._ordered_for.pop(number, None)

    async def close(self) -> None:
        """Save the remaining changes and close the files."""
        await self._save()
        await self._persistence.close()
        if self._writer is not None:
            self._writer.close()
        while not self._queue.empty():
            posted = self._queue.get_nowait()
            if posted.saved is not None:
                posted.saved.cancel()
