"""Calls to several ranks of an elastic role: one generation of the group gets all parts of such a call, or none.

The ranks of an elastic role restart together, so the incarnation of each rank is the generation of the group. A call to
several ranks is a `Cohort` of parts. The parts leave together, once every rank has an address in one generation, a
connection, and room in its window. Until then all of them wait, and a part that fails takes the others with it. The
message names the generation, and the receiver checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

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
)
from rlmesh.runtime.calling.peer_connections import PeerConnections
from rlmesh.runtime.calling.peer_table import PeerTable
from rlmesh.runtime.calling.pending import Cohort, Peer, PendingCall
from rlmesh.runtime.connections.address_book import split_name
from rlmesh.runtime.process import clock
from rlmesh.wire.envelope import Cancel

__all__ = ["CohortSender", "first_parts"]

_SHARED_ERRORS = (CallCancelled, CallTimeout, MailboxFull, Restarting, ShuttingDown)
"""Errors that the other parts fail with as well; the other parts of a lost rank are stale."""


def first_parts(calls: Iterable[PendingCall]) -> list[PendingCall]:
    """The calls, with only one part of each cohort."""
    return list({id(call.cohort or call): call for call in calls}.values())


class HeldCohorts(Protocol):
    """Keeps cohorts that wait for passed arguments."""

    def add_cohort(self, cohort: Cohort) -> None: ...

    def takes_cohort(self, cohort: Cohort) -> bool: ...

    def __bool__(self) -> bool: ...


class CallSender(Protocol):
    """The methods of `Calls` that cohorts use."""

    active_at: float
    detours: int
    closing: bool
    parked: dict[int, PendingCall]
    post: Callable[..., None]
    connections: PeerConnections

    @property
    def held(self) -> HeldCohorts: ...

    def needs_route(self, call: PendingCall) -> bool: ...

    def enter(self, call: PendingCall) -> None: ...

    def send(self, peer: Peer, call: PendingCall) -> None: ...

    def route(self, call: PendingCall) -> None: ...

    def fail(self, call: PendingCall, error: BaseException) -> None: ...

    def refill(self, peers: Iterable[Peer]) -> None: ...


class CohortSender:
    """Sends the cohorts of one runtime."""

    def __init__(self, calls: CallSender, peers: PeerTable) -> None:
        self._calls, self._peers, self._lock = calls, peers, peers.lock

    # Starting: any thread.

    def start(self, cohort: Cohort) -> None:
        """Send all parts, or keep all of them until they can be sent: as `Calls.start`."""
        calls = self._calls
        with self._lock:
            for part in cohort.parts:
                calls.enter(part)
            if any(part.passed is not None for part in cohort.parts):
                calls.detours += 1
                calls.post(calls.held.add_cohort, cohort)
                return
            calls.active_at = clock.now()
            peers = None if calls.detours or calls.closing else self._reachable(cohort)
            if peers is None:
                calls.detours += 1
                calls.post(self._start_on_loop, cohort)
                return
            gates = self._send_or_line_up(cohort, peers)
        self._after_sending(cohort, peers, gates)

    def _reachable(self, cohort: Cohort) -> list[Peer] | None:
        """Under the lock: the connections that the parts take; None if there is something to wait for."""
        peers = []
        for part in cohort.parts:
            needs_route = self._calls.needs_route(part)
            peer = None if needs_route else self._peers.by_endpoint.get(part.endpoint)  # type: ignore[arg-type]
            if peer is None:
                return None
            peers.append(peer)
        return peers if cohort.is_one_generation() else None

    def _send_or_line_up(self, cohort: Cohort, peers: Sequence[Peer]) -> list[Any] | None:
        """Under the lock: send the parts, or line them up where one of the windows is full.

        Returns:
            The locks at which a plain thread has to wait; None if the parts may not wait for room.
        """
        if cohort.over:
            return []
        first = cohort.parts[0]
        if first.future is None or not any(peer.is_full for peer in peers):
            cohort.sent = True
            for peer, part in zip(peers, cohort.parts, strict=True):
                self._calls.send(peer, part)
            return []
        if not first.queue:
            return None
        lined_up = [peer.wait_in_line(part) for peer, part in zip(peers, cohort.parts, strict=True)]
        return [gate for gate in lined_up if gate is not None]

    def _after_sending(self, cohort: Cohort, peers: Iterable[Peer], gates: Iterable[Any] | None) -> None:
        for peer in peers:
            peer.channel.kick()
        first = cohort.parts[0]
        if gates is None:
            full = max(peers, key=lambda peer: len(peer.pending) + len(peer.waiting))
            text = f"{full.window} calls to a rank of {split_name(first.name)[0]} are on their way"
            self._calls.fail(first, first.error(MailboxFull, f"{text} and options(queue=False) was asked for", "no"))
            return
        for gate in gates:
            gate.acquire(timeout=max(0.0, first.deadline - clock.now()))

    # The runtime's loop.

    def _start_on_loop(self, cohort: Cohort) -> None:
        with self._lock:
            self._calls.detours -= 1
        held = self._calls.held
        if not (held and held.takes_cohort(cohort)):
            self.route(cohort)

    def arguments_are_there(self, cohort: Cohort) -> None:
        """Send a cohort whose passed arguments are there and whose turn has come."""
        if any(part.passed is not None for part in cohort.parts):
            with self._lock:
                self._calls.detours -= 1
        for part in cohort.parts:
            if part.passed is not None and not cohort.ended() and (error := part.take_passed()) is not None:
                self._calls.fail(part, error)
        self.route(cohort)

    def route(self, cohort: Cohort) -> None:
        """Send the parts if there is nothing to wait for; otherwise park all of them."""
        if cohort.sent:
            return
        calls, book = self._calls, self._peers.book
        first, role = cohort.parts[0], split_name(cohort.parts[0].name)[0]
        if calls.closing:
            text = f"this process is ending; {first.describe()} was not sent"
            calls.fail(first, first.error(ShuttingDown, text, "no"))
        if cohort.ended():
            self._drop_rest(cohort, None)
            return
        if book is not None and role in book.roles() and not book.is_elastic(role):
            for part in cohort.parts:  # The call was made before anything was known of the role.
                part.cohort = None
                calls.route(part)
            return
        for part in cohort.parts:
            try:
                part.endpoint = self._peers.endpoint_of(part)
            except (RoleNotFound, CallError) as error:
                calls.fail(part, error)
                return
        with self._lock:
            wait = not cohort.is_one_generation()
            for part in cohort.parts:
                wait = wait or part.endpoint is None or part.endpoint in self._peers.orphans
            if wait:
                for part in cohort.parts:
                    part.peer = part.endpoint = None
                    calls.parked[part.call_id] = part
                return
        peers: list[Peer] = []
        for part in cohort.parts:
            assert part.endpoint is not None
            peer = calls.connections.connection_for(part, part.endpoint)
            if peer is None:
                return
            peers.append(peer)
        with self._lock:
            for part in cohort.parts:
                part.timeout_s = max(0.0, part.deadline - clock.now())
            gates = self._send_or_line_up(cohort, peers)
        self._after_sending(cohort, peers, None if gates is None else ())

    def send_from_lines(self, cohort: Cohort) -> bool:
        """Under the lock: send a cohort whose parts are the first of all their lines; False if it has to wait."""
        peers = [part.peer for part in cohort.parts if part.peer is not None]
        if len(peers) < len(cohort.parts) or cohort.over:
            return False
        for peer, part in zip(peers, cohort.parts, strict=True):
            first = bool(peer.waiting) and peer.waiting[0] is part
            if not first or len(peer.pending) >= peer.window or peer.endpoint in self._peers.lost:
                return False
        cohort.sent = True
        for peer, part in zip(peers, cohort.parts, strict=True):
            peer.waiting.popleft()
            part.timeout_s = max(0.0, part.deadline - clock.now())
            self._calls.send(peer, part)
        self._calls.post(self._calls.refill, peers)
        return True

    # Failures of single parts.

    def on_part_failed(self, call: PendingCall, error: BaseException) -> None:
        """Fail the other parts, if none was sent yet, or if the failed part met another generation."""
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
        peers = [part.peer for part in cohort.parts if part.peer is not None]
        for part in rest:
            if cohort.sent and part.peer is not None and part.call_id in part.peer.pending:
                part.peer.channel.send(Cancel(part.call_id), [])
            self._calls.fail(part, _error_of_rest(part, failed, error, executed))
        if peers:
            self._calls.post(self._calls.refill, peers)


def _error_of_rest(
    part: PendingCall, failed: PendingCall, error: BaseException | None, executed: Executed
) -> BaseException:
    """The error of a part that fails because another part did."""
    kind: type[CallError] = CallRejected if executed == "no" else StaleIncarnation
    if isinstance(error, PeerLost | StaleIncarnation):
        kind = StaleIncarnation
    elif isinstance(error, _SHARED_ERRORS):
        kind = type(error)
    what = "was withdrawn" if executed != "no" else "was not sent"
    why = f": {error}" if error is not None else ""
    return part.error(
        kind, f"{part.name}.{part.method}() {what}, since its part for {failed.name} failed{why}", executed
    )
