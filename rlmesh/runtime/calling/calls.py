"""The caller's side: pending calls, their deadlines, and what becomes of them when a peer dies.

Calls start on any thread and leave from it; everything else happens on the runtime's loop. One lock guards the
tables and is never held while user code or a callback runs. The tables are owned by the connections: when one
is lost, each of its calls is ended in one pass, so none can be forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from rlmesh.errors import (
    CallCancelled,
    CallError,
    Executed,
    MailboxFull,
    Restarting,
    RoleNotFound,
    ShuttingDown,
    StaleIncarnation,
    UsageError,
    WireError,
)
from rlmesh.runtime.calling.busy_poll import BusyPoll
from rlmesh.runtime.calling.call_stats import CallRecorder, message_bytes
from rlmesh.runtime.calling.generations import CohortCalls, first_parts
from rlmesh.runtime.calling.pending import Peer, PendingCall, how_it_ended
from rlmesh.runtime.connections.address_book import AddressBook, MemberExit, member_name, split_name
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.future import Future, reject, resolve
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.deadlines import DeadlineEntry, Deadlines
from rlmesh.runtime.process.scheduling_delay import RunQueueMeter
from rlmesh.runtime.serving.dependency_queue import DependencyQueue
from rlmesh.runtime.transport.base import Link
from rlmesh.wire import codec, failure
from rlmesh.wire.envelope import ANY_INCARNATION, Call, Cancel, Flag, Frames, Item, Keep, Release, Reply, StoredReply
from rlmesh.wire.passed import WHOLE, RemoteRef

logger = logging.getLogger(__name__)

LOSS_GRACE_S = 1.0
"""How long a member's lost connection waits for its agent's word on why, before the calls fail without it."""
CONNECT_TIMEOUT_S = 30.0
WINDOW = 1024
"""Calls to one peer that are on their way at once; more where a method of the peer declares that it runs many at once
(`Room`). As many again wait at the caller before a plain thread that calls is blocked; a loop is never blocked, its
calls wait."""


class Calls(CohortCalls):
    """The pending calls of one runtime."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connect: Callable[[str], Link],
        knock: Callable[[Channel, str], None], post: Callable[..., None], meter: RunQueueMeter,
    ) -> None:  # fmt: skip
        super().__init__()
        self.meter, self.ended = meter, CallRecorder()
        self._loop, self._connect_link, self._knock, self._post = loop, connect, knock, post
        self._ids = itertools.count(1)
        self._by_link: dict[Link, Peer] = {}
        self._parked: dict[int, PendingCall] = {}
        self._detours = 0
        self._held = DependencyQueue(post, self._arguments_are_there, self._arguments_of_all_are_there)
        self.busy_poll: BusyPoll | None = None
        self.fetch: Callable[[RemoteRef, float | None], Future[Any]]
        """Set by the runtime: gets a result from its producer."""
        self._deadlines = Deadlines(loop, self._lock, self._expired)
        self._closing = False

    # Starting calls: any thread.

    def start(self, call: PendingCall) -> None:
        """Send a call, or keep it until it can be sent.

        Raises nothing: what goes wrong ends the call's future.
        """
        call.call_id = next(self._ids)
        self.active_at = clock.now()
        gate: Any = None
        with self._lock:
            if call.future is not None:
                self._deadlines.add(call, call.timeout_s)
            # Calls that take the way over the loop (a connection must be made) must not be overtaken.
            detour = self._detours or self._closing or self._book_changes(call)
            peer = None if detour else self._peers.get(call.endpoint)  # type: ignore[arg-type]
            if peer is None:
                self._detours += 1
                self._post(self._start_on_loop, call)
                return
            full = False
            if call.future is None or not (peer.waiting or len(peer.pending) >= peer.window):
                self._send(peer, call)
            elif call.queue:
                gate = self._wait_in_line(peer, call)
            else:
                full = True
        peer.channel.kick()
        if full:
            text = f"{peer.window} calls to {call.name} are on their way and options(queue=False) was asked for"
            self._fail(call, call.error(MailboxFull, text, "no"))
        elif gate is not None:
            # The caller is a plain thread and its line is long: it waits, at most until the call's deadline.
            gate.acquire(timeout=max(0.0, call.deadline - clock.now()))

    def start_later(self, call: PendingCall) -> None:
        """Send a call once its passed arguments are there; later ones to the same member do not overtake it."""
        call.call_id = next(self._ids)
        with self._lock:
            if call.future is not None:
                self._deadlines.add(call, call.timeout_s)
            self._detours += 1
        self._post(self._held.add, call)

    def _arguments_are_there(self, call: PendingCall) -> None:
        """Its turn in the line of held calls has come. On the loop."""
        if call.passed is not None:
            with self._lock:
                self._detours -= 1
            ended = call.future is not None and call.future.done()
            error = call.take_passed()
            if error is not None and not ended:
                self._fail(call, error)
            if error is not None or ended:
                return
        self._route(call)

    def _book_changes(self, call: PendingCall) -> bool:
        """Fill in the endpoint of a member from the address book; True if that needs a closer look."""
        if call.pinned:
            return call.endpoint in self._lost
        member = self._book.find_name(call.name) if self._book is not None else None
        if member is None or member.endpoint is None or (call.name, member.incarnation) in self._dead:
            return True
        if member.endpoint in self._lost or (call.wanted != ANY_INCARNATION and call.wanted != member.incarnation):
            return True
        if call.round is not None and self.left_behind(call, member.incarnation) is not None:
            return True
        call.endpoint, call.incarnation = member.endpoint, member.incarnation
        return False

    def _send(self, peer: Peer, call: PendingCall) -> None:
        if call.future is not None:
            peer.pending[call.call_id] = call
            call.peer = peer
        fields = (call.call_id, call.name, call.incarnation, call.method, call.timeout_s, call.flags, call.chain)
        frames, call.frames = call.frames, []
        call.sent_bytes = message_bytes(frames)
        peer.channel.put(tuple.__new__(Call, fields), frames)  # Half the time of Call(…).
        if call.future is None:
            at = call.started_ns
            self.ended.add((call.name, call.method, call.call_id, at, at, True, 0, 0, call.sent_bytes, 0, -1, 0, None))

    # The runtime's loop.

    def _start_on_loop(self, call: PendingCall) -> None:
        with self._lock:
            self._detours -= 1
        if not (self._held and self._held.takes(call)):
            self._route(call)

    def _route(self, call: PendingCall) -> None:
        if call.cohort is not None:
            self._route_cohort(call.cohort)
            return
        if self._closing:
            self._fail(call, call.error(ShuttingDown, f"this process is ending; {call.describe()} was not sent", "no"))
            return
        if call.future is not None and call.future.done():
            return
        try:
            endpoint = self._endpoint_of(call)
        except (RoleNotFound, CallError) as error:
            self._fail(call, error)
            return
        with self._lock:
            # A connection that was just lost: its agent's word tells soon whether another process takes its place.
            if endpoint is None or (endpoint in self._orphans and not call.pinned):
                self._parked[call.call_id] = call
                return
        if endpoint in self._lost:
            self._fail(call, call.lost(self._lost[endpoint], "no"))
            return
        try:
            peer = self._peers.get(endpoint) or self._connect(endpoint)
        except Exception as error:  # The address is none, or there is no descriptor left.
            text = f"{call.describe()} was not sent: {endpoint}: {type(error).__name__}: {error}"
            self._fail(call, error if isinstance(error, UsageError) else call.error(CallError, text, "no"))
            return
        call.timeout_s = max(0.0, call.deadline - clock.now())
        with self._lock:
            if call.future is not None and (peer.waiting or len(peer.pending) >= peer.window):
                call.peer = peer
                peer.waiting.append(call)
            else:
                self._send(peer, call)
        peer.channel.kick()

    def _endpoint_of(self, call: PendingCall) -> str | None:
        if call.pinned:
            return call.endpoint
        role, rank = split_name(call.name)
        if self._book is None or rank is None:
            return None
        member = self._book.find(role, rank)
        if member is None:
            group = self._book.role(role)
            raise RoleNotFound(f"{role} has {len(group)} members; there is no {call.name}")
        if call.wanted not in (ANY_INCARNATION, member.incarnation):
            if member.incarnation < call.wanted:
                return None
            text = f"{call.name}.{call.method}() was meant for incarnation {call.wanted}; it was restarted since"
            raise call.error(StaleIncarnation, text, "no")
        self.check_round(call, member.incarnation)
        exit_info = self._dead.get((call.name, member.incarnation))
        if exit_info is not None:
            raise call.lost(how_it_ended(exit_info), "no")
        call.incarnation = member.incarnation
        if member.endpoint is None and member.incarnation and not call.queue:
            text = f"{call.name} is being restarted and options(queue=False) was asked for"
            raise call.error(Restarting, text, "no")
        return member.endpoint

    def _connect(self, endpoint: str) -> Peer:
        channel = Channel(self._connect_link(endpoint), self._post)
        peer = Peer(endpoint, channel, WINDOW)
        self._by_link[channel.link] = peer
        self._knock(channel, endpoint)
        peer.opening = clock.Timer(self._loop, CONNECT_TIMEOUT_S, self._not_opened, peer)
        with self._lock:
            self._peers[endpoint] = peer
        return peer

    def channel_of(self, link: Link) -> Channel | None:
        """The channel of a link that this side opened."""
        peer = self._by_link.get(link)
        return peer.channel if peer is not None else None

    def on_admitted(self, link: Link) -> None:
        """The peer and this side have shown each other the job's key."""
        peer = self._by_link.get(link)
        if peer is not None and peer.opening is not None:
            peer.opening.cancel()
            peer.opening = None

    def on_stranger(self, link: Link, error: WireError) -> None:
        """Whoever listens there is none of this job; nothing was said to it."""
        peer = self._by_link.pop(link, None)
        if peer is not None:
            self._forget(peer)
            self._drop(peer, lambda call: type(error)(f"{call.name}.{call.method}() was not sent: {error}"))

    def on_reply(self, link: Link, reply: Reply, frames: Frames) -> None:
        self.active_at = clock.now()
        peer = self._by_link.get(link)
        if peer is None:
            return
        call = self._answered(peer, reply.call_id)
        if call is None:
            return  # The answer comes too late.
        peer.queued_ns = reply.queued_ns
        call.done((reply.executed_ns, reply.queued_ns, reply.run_queue_ns), message_bytes(frames))
        value: Any = None
        error: BaseException | None = None
        try:
            value = codec.decode(frames)
            if not reply.ok:
                role, rank = split_name(call.name)
                error = failure.rebuild(value, role=role, rank=rank, method=call.method, call_id=call.call_id)
        except BaseException as broken:  # Of a value's own code; none of it ends this loop.
            what = f"{type(broken).__name__}: {broken}"
            text = f"the answer of {call.name}.{call.method}() cannot be decoded here: {what}"
            error = call.error(CallError, text, "yes")
            error.__cause__ = broken
        future = call.future
        if future is not None:
            if error is None:
                resolve(future, value)
            else:
                if call.cohort is not None:
                    call.cohort.qualify(error)
                reject(future, error)
                if call.cohort is not None:
                    self.one_failed(call, error)

    def keep(self, call: PendingCall) -> None:
        """Ask the callee to keep the result. From any thread."""
        peer = call.peer
        with self._lock:
            if peer is None or call.call_id not in peer.pending:
                call.flags |= int(Flag.KEEP)
                return
            peer.channel.put(Keep(call.call_id), [])
        peer.channel.kick()

    def on_kept(self, link: Link, kept: StoredReply) -> None:
        """The result of a call stays at its producer."""
        from rlmesh.runtime.calling.future_arguments import KeptResult

        peer = self._by_link.get(link)
        if peer is None:
            return
        call = self._answered(peer, kept.call_id)
        if call is None or call.future is None:
            self._release(peer, kept.token)
            return
        call.done((kept.executed_ns, kept.queued_ns, kept.run_queue_ns))
        where = RemoteRef(call.name, peer.endpoint, call.incarnation, kept.token, WHOLE, 0, 0)
        what = f"{call.name}.{call.method}()"
        call.future.stayed(KeptResult(where, kept.nbytes, what, peer, self._post, self._release, self.fetch))

    def _release(self, peer: Peer, token: int) -> None:
        peer.channel.send(Release(token), [])

    def _answered(self, peer: Peer, call_id: int) -> PendingCall | None:
        """Take a call out of the table; None if it was cancelled or is past its deadline."""
        with self._lock:
            call = peer.pending.pop(call_id, None)
            if call is not None:
                Deadlines.remove(call)
                if peer.waiting:
                    self._refill(peer)
                    peer.channel.kick()
        return call

    def on_item(self, link: Link, item: Item, frames: Frames) -> None:
        self.active_at = clock.now()
        peer = self._by_link.get(link)
        call = peer.pending.get(item.call_id) if peer is not None else None
        if call is not None and call.source is not None:
            call.source.on_item(item.number, frames)

    # What goes wrong: the runtime's loop.

    def cancel(self, call: PendingCall) -> None:
        """The caller cancelled: forget the call and tell the peer. From any thread."""
        peer = call.peer
        with self._lock:
            Deadlines.remove(call)
            self._parked.pop(call.call_id, None)
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
            self._post(self.one_failed, call, call.error(CallCancelled, f"it was cancelled: {call.describe()}", "no"))

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
                state = self.unanswered(call) if peer.channel.authenticated else "it is not connected"
                peer.channel.send(Cancel(call.call_id), [])
            else:
                state = f"{peer.window} calls to it were on their way"
        self._fail(call, call.late(state, executed))

    def on_lost(self, link: Link, reason: str) -> None:
        peer = self._by_link.pop(link, None)
        if peer is None:
            return
        self._forget(peer)
        if peer.channel.peer_name.startswith("@"):
            self._drop(peer, lambda call: call.lost(reason, peer.begun()))
            return
        # Its agent knows exit code, signal and last lines, and says so within milliseconds.
        with self._lock:
            self._lost[peer.endpoint] = reason
            self._orphans[peer.endpoint] = peer
        clock.Timer(self._loop, LOSS_GRACE_S, self._give_up, peer, reason)

    def _give_up(self, peer: Peer, reason: str) -> None:
        if self._is_ending(peer):
            clock.Timer(self._loop, LOSS_GRACE_S, self._give_up, peer, reason)
            return
        self._orphans.pop(peer.endpoint, None)
        self._drop(peer, lambda call: call.lost(reason, peer.begun()))
        self._route_again(list(self._parked.values()))

    def member_lost(self, info: MemberExit) -> None:
        """The agent's word on the end of a member's process: its calls end now, later ones at once."""
        name = member_name(info.role, info.rank)
        with self._lock:
            self._dead[name, info.incarnation] = info
        # To the error, or to the process that takes its place.
        self._route_again([call for call in self._parked.values() if call.name == name])
        member = self._book.find_name(name) if self._book is not None else None
        replaced = member is not None and member.incarnation > info.incarnation
        reason = how_it_ended(info) + ("; it is being restarted" if replaced else "")
        for peer in [*self._peers.values(), *self._orphans.values()]:
            for call in self._calls_of(peer):
                if call.name == name and call.incarnation in (info.incarnation, ANY_INCARNATION):
                    sent = call.call_id in peer.pending
                    if replaced and not sent and not call.pinned:
                        self._move(call)
                    else:
                        self._fail(call, call.lost(reason, "maybe" if sent and info.served else "no"))

    def _route_again(self, calls: list[PendingCall]) -> None:
        with self._lock:
            for call in calls:
                for part in call.cohort.parts if call.cohort is not None else (call,):
                    self._parked.pop(part.call_id, None)
        for call in first_parts(calls):
            self._route(call)

    def set_book(self, book: AddressBook) -> None:
        """Take a newer address book; calls that waited for an endpoint go out."""
        with self._lock:
            if self._book is not None and book.version <= self._book.version:
                return
            self._book = book
        self._route_again(list(self._parked.values()))

    def pending(self) -> Iterator[PendingCall]:
        """All calls without an answer. From any thread."""
        with self._lock:
            found = [*self._parked.values(), *self._held.all()]
            for peer in [*self._peers.values(), *self._orphans.values()]:
                found += [*peer.pending.values(), *peer.waiting]
        yield from found

    def close(self) -> None:
        """Fail what is pending; queued packets still go out."""
        self._closing = True
        for call in list(self.pending()):
            if call.cohort is not None and call.cohort.over:
                continue  # It went with another part.
            text = f"this process is ending; {call.describe()} got no answer"
            self._fail(call, call.error(ShuttingDown, text, "maybe"))
        for peer in self._peers.values():
            if peer.opening is not None:
                peer.opening.cancel()
            peer.channel.flush()
        self._deadlines.close()

    def _not_opened(self, peer: Peer) -> None:
        peer.opening = None
        reason = f"nobody answered at {peer.endpoint} within {CONNECT_TIMEOUT_S:.0f} s"
        self._by_link.pop(peer.channel.link, None)
        self._forget(peer)
        peer.channel.link.close()
        self._drop(peer, lambda call: call.lost(reason, "no"))

    def _forget(self, peer: Peer) -> None:
        if peer.opening is not None:
            peer.opening.cancel()
            peer.opening = None
        with self._lock:
            if self._peers.get(peer.endpoint) is peer:
                del self._peers[peer.endpoint]

    def _drop(self, peer: Peer, error_of: Callable[[PendingCall], BaseException]) -> None:
        for call in self._calls_of(peer):
            self._fail(call, error_of(call))

    def _fail(self, call: PendingCall, error: BaseException) -> None:
        self.active_at = clock.now()
        with self._lock:
            peer = call.peer
            if peer is not None:
                peer.pending.pop(call.call_id, None)
                if call in peer.waiting:
                    peer.waiting.remove(call)
                self._let_on(peer)
            self._parked.pop(call.call_id, None)
            Deadlines.remove(call)
        call.done(None)
        if call.cohort is not None:
            call.cohort.qualify(error)
        if call.future is not None:
            reject(call.future, error)
        else:
            logger.warning("notification %s was not delivered: %s", call.describe(), error)
        if call.cohort is not None:
            self.one_failed(call, error)
