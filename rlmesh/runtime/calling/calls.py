"""The caller's side of calls: pending calls, their deadlines, and their end when a peer dies.

Calls start on any thread and leave from it; everything else happens on the runtime's loop. One lock guards the tables
and is never held while user code or a callback runs. Each connection (`Peer`) owns the table of its calls: when a
connection is lost, all of its calls are ended in one pass, so none can be forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from rlmesh.errors import CallCancelled, CallError, Executed, MailboxFull, RoleNotFound, ShuttingDown
from rlmesh.runtime.calling.busy_poll import BusyPoll
from rlmesh.runtime.calling.call_stats import CallRecorder, RunQueueMeter
from rlmesh.runtime.calling.generations import CohortSender, first_parts
from rlmesh.runtime.calling.peer_connections import PeerConnections
from rlmesh.runtime.calling.peer_table import PeerTable
from rlmesh.runtime.calling.pending import DeadlineEntry, Deadlines, Peer, PendingCall, how_it_ended
from rlmesh.runtime.connections.address_book import AddressBook, MemberExit, member_name, split_name
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.future import Future
from rlmesh.runtime.process import clock
from rlmesh.runtime.rpc import MAX_CONCURRENT
from rlmesh.runtime.serving.dependency_queue import DependencyQueue
from rlmesh.runtime.transport.base import Link
from rlmesh.wire import codec, failure
from rlmesh.wire.envelope import (
    ANY_INCARNATION,
    Call,
    Cancel,
    Concurrency,
    Flag,
    Frames,
    Item,
    Keep,
    Release,
    Reply,
    StoredReply,
)
from rlmesh.wire.passed import WHOLE, RemoteRef

logger = logging.getLogger(__name__)


class Calls:
    """The pending calls of one runtime.

    Attributes:
        peers: addresses, connections and deaths.
        connections: opens connections, and ends the calls of lost ones.
        stats: the calls that have ended.
        active_at: when this process last sent a call, got an answer, or gave another sign of life.
        parked: calls that wait for an address, by their ids.
        detours: the number of calls on their way over the loop. Later calls must not overtake them, and take the same
            way.
        closing: the runtime is being closed.
        fetch: gets a result from its producer; set by the runtime.
    """

    fetch: Callable[[RemoteRef, float | None], Future[Any]]

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connect: Callable[[str], Link],
        shake_hands: Callable[[Channel, str], None], post: Callable[..., None], meter: RunQueueMeter,
    ) -> None:  # fmt: skip
        self.peers = PeerTable()
        self.meter, self.stats = meter, CallRecorder()
        self.active_at = clock.now()
        self.parked: dict[int, PendingCall] = {}
        self.detours = 0
        self.closing = False
        self.busy_poll: BusyPoll | None = None
        self.post = post
        self.connections = PeerConnections(
            self.peers, loop, post, connect, shake_hands, self.fail, lambda: self._route_again(self.parked.values())
        )
        self._lock = self.peers.lock
        self._ids = itertools.count(1)
        self._deadlines = Deadlines(loop, self._lock, self._expired)
        self.cohorts = CohortSender(self, self.peers)
        self.held = DependencyQueue(post, self._arguments_are_there, self.cohorts.arguments_are_there)

    # Starting calls: any thread.

    def start(self, call: PendingCall) -> None:
        """Send a call, or keep it until it can be sent.

        A call with passed arguments is sent once they are there; later calls to the same member do not overtake it.
        Raises nothing: a failure ends the call's future.
        """
        if call.passed is not None:
            with self._lock:
                self.enter(call)
                self.detours += 1
            self.post(self.held.add, call)
            return
        call.call_id = next(self._ids)
        self.active_at = clock.now()
        gate: Any = None
        with self._lock:
            if call.future is not None:
                self._deadlines.add(call, call.timeout_s)
            detour = self.detours or self.closing or self.needs_route(call)
            peer = None if detour else self.peers.by_endpoint.get(call.endpoint)  # type: ignore[arg-type]
            if peer is None:
                self.detours += 1
                self.post(self._start_on_loop, call)
                return
            full = False
            if call.future is None or not (peer.waiting or len(peer.pending) >= peer.window):
                self.send(peer, call)
            elif call.queue:
                gate = peer.wait_in_line(call)
            else:
                full = True
        peer.channel.kick()
        if full:
            text = f"{peer.window} calls to {call.name} are on their way and options(queue=False) was asked for"
            self.fail(call, call.error(MailboxFull, text, "no"))
        elif gate is not None:
            # The caller is a plain thread and its line is long: it waits, at most until the call's deadline.
            gate.acquire(timeout=max(0.0, call.deadline - clock.now()))

    def needs_route(self, call: PendingCall) -> bool:
        """Under the lock: set the endpoint of a call from the address book; True if the call has to take the way over
        the loop (`route`)."""
        peers = self.peers
        if call.pinned:
            return call.endpoint in peers.lost
        member = peers.book.by_name.get(call.name) if peers.book is not None else None
        if member is None or member.endpoint is None or (call.name, member.incarnation) in peers.dead:
            return True
        if member.endpoint in peers.lost or (call.wanted != ANY_INCARNATION and call.wanted != member.incarnation):
            return True
        if call.rank_loop is not None and peers.left_behind(call, member.incarnation) is not None:
            return True
        call.endpoint, call.incarnation = member.endpoint, member.incarnation
        return False

    def enter(self, call: PendingCall) -> None:
        """Under the lock: number a call and start its deadline."""
        call.call_id = next(self._ids)
        if call.future is not None:
            self._deadlines.add(call, call.timeout_s)

    def send(self, peer: Peer, call: PendingCall) -> None:
        """Under the lock: put a call into the table of a connection and into its outbox."""
        if call.future is not None:
            peer.pending[call.call_id] = call
            call.peer = peer
        fields = (call.call_id, call.name, call.incarnation, call.method, call.timeout_s, call.flags, call.chain)
        frames, call.frames = call.frames, []
        call.sent_bytes = len(frames[0]) if len(frames) == 1 else codec.size_bytes(frames)
        peer.channel.put(tuple.__new__(Call, fields), frames)  # Takes half the time of Call(…).
        if call.future is None:
            at = call.started_ns
            self.stats.add((call.name, call.method, call.call_id, at, at, True, 0, 0, call.sent_bytes, 0, -1, 0, None))

    # The way over the loop.

    def _start_on_loop(self, call: PendingCall) -> None:
        with self._lock:
            self.detours -= 1
        if not (self.held and self.held.takes(call)):
            self.route(call)

    def _arguments_are_there(self, call: PendingCall) -> None:
        """Send a call whose passed arguments are there and whose turn has come."""
        if call.passed is not None:
            with self._lock:
                self.detours -= 1
            ended = call.future is not None and call.future.done()
            error = call.take_passed()
            if error is not None and not ended:
                self.fail(call, error)
            if error is not None or ended:
                return
        self.route(call)

    def route(self, call: PendingCall) -> None:
        """Send a call over a connection that may have to be made, park it until its address is known, or fail it."""
        if call.cohort is not None:
            self.cohorts.route(call.cohort)
            return
        if self.closing:
            self.fail(call, call.error(ShuttingDown, f"this process is ending; {call.describe()} was not sent", "no"))
            return
        if call.future is not None and call.future.done():
            return
        try:
            endpoint = self.peers.endpoint_of(call)
        except (RoleNotFound, CallError) as error:
            self.fail(call, error)
            return
        with self._lock:
            # A connection that was just lost: the agent reports soon whether another process takes the member's place.
            if endpoint is None or (endpoint in self.peers.orphans and not call.pinned):
                self.parked[call.call_id] = call
                return
        peer = self.connections.connection_for(call, endpoint)
        if peer is None:
            return
        call.timeout_s = max(0.0, call.deadline - clock.now())
        with self._lock:
            if call.future is not None and peer.is_full:
                call.peer = peer
                peer.waiting.append(call)
            else:
                self.send(peer, call)
        peer.channel.kick()

    # Waiting for room.

    def on_concurrency(self, link: Link, concurrency: Concurrency) -> None:
        """Widen the window of a peer one of whose methods runs many calls at once."""
        peer = self.peers.by_link.get(link)
        if peer is not None:
            peer.window = max(peer.window, peer.normal_window + min(concurrency.calls, MAX_CONCURRENT))
            self.refill([peer])

    def refill(self, peers: Iterable[Peer]) -> None:
        """Send the waiting calls for which there is room now."""
        for peer in peers:
            with self._lock:
                self._refill(peer)
            peer.channel.kick()

    def _refill(self, peer: Peer) -> None:
        """Under the lock: send calls that waited for room, then let threads that waited in line go on."""
        while peer.waiting and len(peer.pending) < peer.window:
            call = peer.waiting[0]
            if call.cohort is None:
                peer.waiting.popleft()
                call.timeout_s = max(0.0, call.deadline - clock.now())
                self.send(peer, call)
            elif not self.cohorts.send_from_lines(call.cohort):
                break
        peer.unblock_threads()

    # Answers.

    def on_reply(self, link: Link, reply: Reply, frames: Frames) -> None:
        """End the call that a reply answers."""
        self.active_at = clock.now()
        peer = self.peers.by_link.get(link)
        if peer is None:
            return
        call = self._answered(peer, reply.call_id)
        if call is None:
            return  # The answer comes too late.
        peer.queued_ns = reply.queued_ns
        nbytes = len(frames[0]) if len(frames) == 1 else codec.size_bytes(frames)
        call.done((reply.executed_ns, reply.queued_ns, reply.run_queue_ns), nbytes)
        value: Any = None
        error: BaseException | None = None
        try:
            value = codec.decode(frames)
            if not reply.ok:
                role, rank = split_name(call.name)
                error = failure.rebuild(value, role=role, rank=rank, method=call.method, call_id=call.call_id)
        except BaseException as broken:  # Raised by a value's own code, which must not end this loop.
            what = f"{type(broken).__name__}: {broken}"
            text = f"the answer of {call.name}.{call.method}() cannot be decoded here: {what}"
            error = call.error(CallError, text, "yes")
            error.__cause__ = broken
        future = call.future
        if future is not None:
            if error is None:
                future.end(value, None)
            else:
                if call.cohort is not None:
                    call.cohort.qualify(error)
                future.end(None, error)
                if call.cohort is not None:
                    self.cohorts.on_part_failed(call, error)

    def leave_at_callee(self, call: PendingCall) -> None:
        """Ask the callee to store the result. From any thread."""
        peer = call.peer
        with self._lock:
            if peer is None or call.call_id not in peer.pending:
                call.flags |= int(Flag.KEEP)
                return
            peer.channel.put(Keep(call.call_id), [])
        peer.channel.kick()

    def on_stored_reply(self, link: Link, reply: StoredReply) -> None:
        """End the call whose result its producer stores."""
        from rlmesh.runtime.calling.future_arguments import StoredResult

        peer = self.peers.by_link.get(link)
        if peer is None:
            return
        release = partial(peer.channel.send, Release(reply.token), [])
        call = self._answered(peer, reply.call_id)
        if call is None or call.future is None:
            release()
            return
        call.done((reply.executed_ns, reply.queued_ns, reply.run_queue_ns))
        ref = RemoteRef(call.name, peer.endpoint, call.incarnation, reply.token, WHOLE, 0, 0)
        call.future.set_stored(
            StoredResult(ref, f"{call.name}.{call.method}()", partial(self.post, release), self.fetch)
        )

    def _answered(self, peer: Peer, call_id: int) -> PendingCall | None:
        """Take a call out of the table; None if it was cancelled or is past its deadline."""
        with self._lock:
            call = peer.pending.pop(call_id, None)
            if call is not None:
                if call.bucket is not None:  # `Deadlines.remove`, written out because this runs once per call.
                    call.bucket.pop(call_id, None)
                    call.bucket = None
                if peer.waiting:
                    self._refill(peer)
                    peer.channel.kick()
        return call

    def on_item(self, link: Link, item: Item, frames: Frames) -> None:
        """Give an item of a stream to its consumer."""
        self.active_at = clock.now()
        peer = self.peers.by_link.get(link)
        call = peer.pending.get(item.call_id) if peer is not None else None
        if call is not None and call.source is not None:
            call.source.on_item(item.number, frames)

    # Failures: on the runtime's loop, unless said otherwise.

    def cancel(self, call: PendingCall) -> None:
        """Forget a call that its caller cancelled, and tell the peer. From any thread."""
        peer = call.peer
        with self._lock:
            Deadlines.remove(call)
            self.parked.pop(call.call_id, None)
            sent = peer is not None and peer.pending.pop(call.call_id, None) is not None
            if peer is not None:
                if not sent and call in peer.waiting:
                    peer.waiting.remove(call)
                self._refill(peer)
                if sent:
                    peer.channel.put(Cancel(call.call_id), [])
        if peer is not None:
            peer.channel.kick()
        call.done(None)
        if call.cohort is not None and not call.cohort.sent:
            error = call.error(CallCancelled, f"it was cancelled: {call.describe()}", "no")
            self.post(self.cohorts.on_part_failed, call, error)

    def fail(self, call: PendingCall, error: BaseException) -> None:
        """End a call with an error."""
        self.active_at = clock.now()
        with self._lock:
            peer = call.peer
            if peer is not None:
                peer.pending.pop(call.call_id, None)
                if call in peer.waiting:
                    peer.waiting.remove(call)
                peer.unblock_threads()
            self.parked.pop(call.call_id, None)
            Deadlines.remove(call)
        call.done(None)
        if call.cohort is not None:
            call.cohort.qualify(error)
        if call.future is not None:
            call.future.end(None, error)
        else:
            logger.warning("notification %s was not delivered: %s", call.describe(), error)
        if call.cohort is not None:
            self.cohorts.on_part_failed(call, error)

    def _expired(self, entry: DeadlineEntry) -> None:
        call: PendingCall = entry  # type: ignore[assignment]
        peer = call.peer
        executed: Executed = "no"
        state = "its member has not published an endpoint yet"
        if call.cohort is not None:
            state = "not every rank that the call goes to has published an endpoint, all in one incarnation"
        if call.passed is not None:
            state = f"an argument was not there: {call.passed.describe()}"
        if peer is not None:
            if call.call_id in peer.pending:
                executed = "maybe"
                state = self.peers.unanswered(call) if peer.channel.authenticated else "it is not connected"
                peer.channel.send(Cancel(call.call_id), [])
            else:
                state = f"{peer.window} calls to it were on their way"
        self.fail(call, call.timeout_error(state, executed))

    def member_lost(self, info: MemberExit) -> None:
        """Take an agent's report on the end of a member's process: its calls end now, later ones at once."""
        name = member_name(info.role, info.rank)
        peers = self.peers
        with self._lock:
            peers.dead[name, info.incarnation] = info
        # Parked calls to the dead member fail now, or go to the process that takes its place.
        self._route_again([call for call in self.parked.values() if call.name == name])
        member = peers.book.by_name.get(name) if peers.book is not None else None
        replaced = member is not None and member.incarnation > info.incarnation
        reason = how_it_ended(info) + ("; it is being restarted" if replaced else "")
        for peer in [*peers.by_endpoint.values(), *peers.orphans.values()]:
            for call in peers.calls_of(peer):
                if call.name == name and call.incarnation in (info.incarnation, ANY_INCARNATION):
                    sent = call.call_id in peer.pending
                    if replaced and not sent and not call.pinned:
                        self._move(call)
                    else:
                        self.fail(call, call.lost(reason, "maybe" if sent and info.served else "no"))

    def _move(self, call: PendingCall) -> None:
        """Send a call that waited in line for a dead process to the process that takes its place."""
        with self._lock:
            for part in call.cohort.parts if call.cohort is not None else (call,):
                if part.peer is not None and part in part.peer.waiting:
                    part.peer.waiting.remove(part)
                    part.peer.unblock_threads()
                part.peer = part.endpoint = None
        self.route(call)

    def _route_again(self, parked: Iterable[PendingCall]) -> None:
        calls = list(parked)
        with self._lock:
            for call in calls:
                for part in call.cohort.parts if call.cohort is not None else (call,):
                    self.parked.pop(part.call_id, None)
        for call in first_parts(calls):
            self.route(call)

    def set_book(self, book: AddressBook) -> None:
        """Take a newer address book; calls that waited for an endpoint go out."""
        with self._lock:
            if self.peers.book is not None and book.version <= self.peers.book.version:
                return
            self.peers.book = book
        self._route_again(self.parked.values())

    def end_all(self, why: str) -> None:
        """Fail the calls that have no answer: no process is left that could give one."""
        for call in list(self.pending()):
            self.fail(call, call.lost(why, "maybe" if call.peer is not None else "no"))

    def pending(self) -> Iterator[PendingCall]:
        """All calls without an answer. From any thread."""
        with self._lock:
            found = [*self.parked.values(), *self.held.all()]
            for peer in [*self.peers.by_endpoint.values(), *self.peers.orphans.values()]:
                found += [*peer.pending.values(), *peer.waiting]
        yield from found

    def close(self) -> None:
        """Fail the calls that are pending; queued packets still go out."""
        self.closing = True
        for call in list(self.pending()):
            if call.cohort is not None and call.cohort.over:
                continue  # It has failed already, together with another part of its cohort.
            text = f"this process is ending; {call.describe()} got no answer"
            self.fail(call, call.error(ShuttingDown, text, "maybe"))
        self.connections.close()
        self._deadlines.close()
