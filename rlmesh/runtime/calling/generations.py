"""Calls to several ranks of an elastic role: one generation of the group gets all parts of such a call, or none.

The ranks of an elastic role restart together, so the incarnation of each rank is the generation of the group. A call to
several ranks is a *cohort* of parts. The parts leave together, once every rank that is called has an address in one
generation, a connection, and room in its window. Until then all of them wait, and a part that fails takes the others
with it. The message names the generation, and the receiver checks it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlmesh.errors import (
    CallCancelled,
    CallError,
    CallRejected,
    CallTimeout,
    Executed,
    MailboxFull,
    PeerLost,
    Restarting,
    RoleNotFound,
    ShuttingDown,
    StaleIncarnation,
    UsageError,
)
from rlmesh.runtime.calling.peer_table import Knowledge
from rlmesh.runtime.calling.pending import Peer, PendingCall
from rlmesh.runtime.connections.address_book import split_name
from rlmesh.runtime.connections.channel import turn_loops
from rlmesh.runtime.process import clock
from rlmesh.runtime.rpc import MAX_CONCURRENT
from rlmesh.runtime.transport.base import Link
from rlmesh.wire.envelope import Cancel, Concurrency

if TYPE_CHECKING:
    from rlmesh.runtime.process.deadlines import Deadlines
    from rlmesh.runtime.serving.dependency_queue import DependencyQueue

__all__ = ["Cohort", "CohortCalls", "first_parts"]

_SHARED_FATE = (CallCancelled, CallTimeout, MailboxFull, Restarting, ShuttingDown)
"""What one part fails with, the parts that it takes along fail with, too; of a lost rank they are stale."""


class Cohort:
    """The parts of one call to several ranks of an elastic role.

    Attributes:
        parts: one for each rank.
        newer_than: only a later generation than this one may get them; -1 for any.
        generation: the one that they were sent to, or are meant for at present.
        sent: they have left. Guarded by the lock of the tables.
        over: one of them has failed, and the others with it.
    """

    __slots__ = ("generation", "newer_than", "over", "parts", "sent")

    def __init__(self, parts: Sequence[PendingCall], newer_than: int = -1) -> None:
        self.parts, self.newer_than = parts, newer_than
        self.generation = -1
        self.sent = self.over = False
        for part in parts:
            part.cohort = self

    def ended(self) -> bool:
        """Whether a part has an end already, so that the others must not begin."""
        return self.over or any(part.future is not None and part.future.done() for part in self.parts)

    def qualify(self, error: BaseException) -> None:
        """A part failed because its rank is lost or of another generation: the role is one, and other ranks may have
        begun."""
        if self.sent and isinstance(error, PeerLost | StaleIncarnation) and error.executed == "no":
            error.executed = "maybe"


def first_parts(calls: Iterable[PendingCall]) -> list[PendingCall]:
    """The calls, and of each cohort among them one part only."""
    return list({id(call.cohort or call): call for call in calls}.values())


class CohortCalls(Knowledge):
    """What `Calls` knows of cohorts, and of the lines in which calls wait for room."""

    _ids: itertools.count[int]
    _detours: int
    _closing: bool
    _parked: dict[int, PendingCall]
    _deadlines: Deadlines
    _held: DependencyQueue
    _post: Callable[..., None]
    _loop: asyncio.AbstractEventLoop
    _by_link: dict[Link, Peer]

    if TYPE_CHECKING:

        def _send(self, peer: Peer, call: PendingCall) -> None: ...
        def _fail(self, call: PendingCall, error: BaseException) -> None: ...
        def _route(self, call: PendingCall) -> None: ...
        def _connect(self, endpoint: str) -> Peer: ...
        def _book_changes(self, call: PendingCall) -> bool: ...
        def _endpoint_of(self, call: PendingCall) -> str | None: ...

    def go_together(self, role: str) -> bool:
        """Whether calls to ranks of this role are parts of one; so they are as long as nothing is known of the role."""
        return self._book is None or self._book.is_elastic(role)

    def generation(self, role: str) -> int:
        """The newest generation of an elastic role that this process has heard of."""
        found = self._book.role(role) if self._book is not None and role in self._book.roles() else ()
        return max((member.incarnation for member in found), default=-1)

    def left_behind(self, call: PendingCall, generation: int) -> PendingCall | None:
        """A call that a program made in one loop with this one and that an older generation got."""
        if call.round is None or self._book is None or not self._book.is_elastic(split_name(call.name)[0]):
            return None
        return call.round.left_behind(call, generation)

    def check_round(self, call: PendingCall, generation: int) -> None:
        """Refuse a call that would run alone in its generation.

        Raises:
            StaleIncarnation: another one of its loop went to an older one.
        """
        other = self.left_behind(call, generation)
        if other is not None:
            text = (
                f"{call.name}.{call.method}() was not sent: its group restarted (incarnation {generation}) since "
                f"{other.name}.{other.method}() was called (incarnation {other.incarnation}). Ranks that are called "
                "one by one would not run the same calls: call the group as a whole, or all ranks again"
            )
            raise call.error(StaleIncarnation, text, "no")

    # Starting: any thread.

    def start_cohort(self, cohort: Cohort) -> None:
        """Send all parts, or keep all of them until they can be sent. Raises nothing, as `Calls.start`."""
        self.active_at = clock.now()
        with self._lock:
            self._enter(cohort)
            peers = None if self._detours or self._closing else self._reachable(cohort)
            if peers is None:
                self._detours += 1
                self._post(self._start_cohort_on_loop, cohort)
                return
            gates = self._leave(cohort, peers)
        self._left(cohort, peers, gates)

    def start_cohort_later(self, cohort: Cohort) -> None:
        """Send all parts once the passed arguments of all are there."""
        with self._lock:
            self._enter(cohort)
            self._detours += 1
        self._post(self._held.add_cohort, cohort)

    def _enter(self, cohort: Cohort) -> None:
        for part in cohort.parts:
            part.call_id = next(self._ids)
            if part.future is not None:
                self._deadlines.add(part, part.timeout_s)

    def _reachable(self, cohort: Cohort) -> list[Peer] | None:
        """Under the lock: the connections that the parts take, if there is nothing to wait for."""
        peers = []
        for part in cohort.parts:
            peer = None if self._book_changes(part) else self._peers.get(part.endpoint)  # type: ignore[arg-type]
            if peer is None:
                return None
            peers.append(peer)
        return peers if self._is_one(cohort) else None

    def _is_one(self, cohort: Cohort) -> bool:
        """Whether all parts are meant for one generation, and for one that may get them."""
        cohort.generation = cohort.parts[0].incarnation
        return cohort.generation > cohort.newer_than and all(
            part.incarnation == cohort.generation for part in cohort.parts
        )

    def _leave(self, cohort: Cohort, peers: Sequence[Peer]) -> list[Any] | None:
        """Under the lock: send the parts, or line them up where one of the windows is full; gives the gates at which a
        plain thread has to wait then. None: they may not wait."""
        if cohort.over:
            return []
        first = cohort.parts[0]
        if first.future is None or not any(peer.waiting or len(peer.pending) >= peer.window for peer in peers):
            cohort.sent = True
            for peer, part in zip(peers, cohort.parts, strict=True):
                self._send(peer, part)
            return []
        if not first.queue:
            return None
        lined = [self._wait_in_line(peer, part) for peer, part in zip(peers, cohort.parts, strict=True)]
        return [gate for gate in lined if gate is not None]

    def _left(self, cohort: Cohort, peers: Iterable[Peer], gates: Iterable[Any] | None) -> None:
        for peer in peers:
            peer.channel.kick()
        first = cohort.parts[0]
        if gates is None:
            full = max(peers, key=lambda peer: len(peer.pending) + len(peer.waiting))
            text = f"{full.window} calls to a rank of {split_name(first.name)[0]} are on their way"
            self._fail(first, first.error(MailboxFull, f"{text} and options(queue=False) was asked for", "no"))
            return
        for gate in gates:
            gate.acquire(timeout=max(0.0, first.deadline - clock.now()))

    # The runtime's loop.

    def _start_cohort_on_loop(self, cohort: Cohort) -> None:
        with self._lock:
            self._detours -= 1
        if not (self._held and self._held.takes_cohort(cohort)):
            self._route_cohort(cohort)

    def _arguments_of_all_are_there(self, cohort: Cohort) -> None:
        """The turn of a cohort in the lines of held calls has come."""
        if any(part.passed is not None for part in cohort.parts):
            with self._lock:
                self._detours -= 1
        for part in cohort.parts:
            if part.passed is not None and not cohort.ended() and (error := part.take_passed()) is not None:
                self._fail(part, error)
        self._route_cohort(cohort)

    def _route_cohort(self, cohort: Cohort) -> None:
        """Send the parts if there is nothing to wait for; otherwise all of them wait."""
        if cohort.sent:
            return
        first, role = cohort.parts[0], split_name(cohort.parts[0].name)[0]
        if self._closing:
            text = f"this process is ending; {first.describe()} was not sent"
            self._fail(first, first.error(ShuttingDown, text, "no"))
        if cohort.ended():
            self._drop_rest(cohort, None)
            return
        if self._book is not None and role in self._book.roles() and not self._book.is_elastic(role):
            for part in cohort.parts:  # It was called before anything was known of the role.
                part.cohort = None
                self._route(part)
            return
        peers: list[Peer] = []
        for part in cohort.parts:
            try:
                part.endpoint = self._endpoint_of(part)
            except (RoleNotFound, CallError) as error:
                self._fail(part, error)
                return
        with self._lock:
            wait = not self._is_one(cohort)
            for part in cohort.parts:
                wait = wait or part.endpoint is None or part.endpoint in self._orphans
            if wait:
                for part in cohort.parts:
                    part.peer = part.endpoint = None
                    self._parked[part.call_id] = part
                return
        for part in cohort.parts:
            assert part.endpoint is not None
            if part.endpoint in self._lost:
                self._fail(part, part.lost(self._lost[part.endpoint], "no"))
                return
            try:
                peers.append(self._peers.get(part.endpoint) or self._connect(part.endpoint))
            except Exception as error:  # The address is none, or there is no descriptor left.
                text = f"{part.describe()} was not sent: {part.endpoint}: {type(error).__name__}: {error}"
                self._fail(part, error if isinstance(error, UsageError) else part.error(CallError, text, "no"))
                return
        with self._lock:
            for part in cohort.parts:
                part.timeout_s = max(0.0, part.deadline - clock.now())
            gates = self._leave(cohort, peers)
        self._left(cohort, peers, None if gates is None else ())

    # One part ends before its time.

    def one_failed(self, call: PendingCall, error: BaseException) -> None:
        """A part has failed: before they were sent, the others go with it; afterwards only if it met another
        generation."""
        cohort = call.cohort
        assert cohort is not None
        if not cohort.over and (not cohort.sent or isinstance(error, StaleIncarnation)):
            self._drop_rest(cohort, call, error)

    def _drop_rest(self, cohort: Cohort, failed: PendingCall | None, error: BaseException | None = None) -> None:
        with self._lock:
            if cohort.over and failed is not None:
                return
            cohort.over = True
        if failed is None:
            failed = next((part for part in cohort.parts if part.future and part.future.done()), cohort.parts[0])
        rest = [part for part in cohort.parts if part is not failed and not (part.future and part.future.done())]
        executed: Executed = "maybe" if cohort.sent else "no"
        lines = [part.peer for part in cohort.parts if part.peer is not None]
        for part in rest:
            if cohort.sent and part.peer is not None and part.call_id in part.peer.pending:
                part.peer.channel.send(Cancel(part.call_id), [])
            self._fail(part, _taken_along(part, failed, error, executed))
        if lines:
            self._post(self._refill_all, lines)

    # Lines.

    def _wait_in_line(self, peer: Peer, call: PendingCall) -> Any:
        call.peer = peer
        peer.waiting.append(call)
        if len(peer.waiting) <= peer.window or threading.get_ident() in turn_loops or asyncio._get_running_loop():
            return None
        gate = allocate_lock()
        gate.acquire()
        peer.blocked.append(gate)
        return gate

    def on_room(self, link: Link, room: Concurrency) -> None:
        """A method there runs many calls at once: so many more may be on their way."""
        peer = self._by_link.get(link)
        if peer is not None:
            peer.window = max(peer.window, peer.normal_window + min(room.calls, MAX_CONCURRENT))
            self._refill_all([peer])

    def _refill(self, peer: Peer) -> None:
        """Under the lock: calls that waited for room go out, then threads that waited in line go on."""
        while peer.waiting and len(peer.pending) < peer.window:
            call = peer.waiting[0]
            if call.cohort is None:
                peer.waiting.popleft()
                call.timeout_s = max(0.0, call.deadline - clock.now())
                self._send(peer, call)
            elif not self._send_lined(call.cohort):
                break
        self._let_on(peer)

    def _send_lined(self, cohort: Cohort) -> bool:
        """Under the lock: send a cohort whose parts are the first of all their lines; False if it must wait on."""
        peers = [part.peer for part in cohort.parts if part.peer is not None]
        if len(peers) < len(cohort.parts) or cohort.over:
            return False
        for peer, part in zip(peers, cohort.parts, strict=True):
            first = bool(peer.waiting) and peer.waiting[0] is part
            if not first or len(peer.pending) >= peer.window or peer.endpoint in self._lost:
                return False
        cohort.sent = True
        for peer, part in zip(peers, cohort.parts, strict=True):
            peer.waiting.popleft()
            part.timeout_s = max(0.0, part.deadline - clock.now())
            self._send(peer, part)
        self._post(self._refill_all, peers)
        return True

    def _refill_all(self, peers: Iterable[Peer]) -> None:
        """Other calls may be the first of their lines now."""
        for peer in peers:
            with self._lock:
                self._refill(peer)
            peer.channel.kick()

    def _let_on(self, peer: Peer) -> None:
        """Under the lock: threads that waited for room in a line go on."""
        while peer.blocked and len(peer.waiting) < peer.window:
            peer.blocked.popleft().release()

    def _move(self, call: PendingCall) -> None:
        """A call that waited in line for a process that is gone goes to the one that takes its place."""
        with self._lock:
            for part in call.cohort.parts if call.cohort is not None else (call,):
                if part.peer is not None and part in part.peer.waiting:
                    part.peer.waiting.remove(part)
                    self._let_on(part.peer)
                part.peer = part.endpoint = None
        self._route(call)


def _taken_along(
    part: PendingCall, failed: PendingCall, error: BaseException | None, executed: Executed
) -> BaseException:
    """The error of a part that fails because another one did."""
    kind: type[CallError] = CallRejected if executed == "no" else StaleIncarnation
    if isinstance(error, PeerLost | StaleIncarnation):
        kind = StaleIncarnation
    elif isinstance(error, _SHARED_FATE):
        kind = type(error)
    what = "was withdrawn" if executed != "no" else "was not sent"
    why = f": {error}" if error is not None else ""
    return part.error(
        kind, f"{part.name}.{part.method}() {what}, since its part for {failed.name} failed{why}", executed
    )
