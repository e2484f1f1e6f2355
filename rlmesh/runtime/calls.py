"""The caller's side: pending calls, their deadlines, and what becomes of them when a peer dies.

All methods run on the runtime's loop. The table is owned by the connections: when one is lost, each of its
calls is ended in one pass, so none can be forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

from rlmesh.errors import (
    CallError,
    CallTimeout,
    Executed,
    PeerLost,
    RoleNotFound,
    ShuttingDown,
    VersionMismatch,
)
from rlmesh.runtime.address import AddressBook, member_name, split_name
from rlmesh.runtime.channel import Channel, make_hello
from rlmesh.runtime.deadlines import Deadlines
from rlmesh.runtime.future import Future, reject, resolve
from rlmesh.runtime.timing import GroupTimer, MemberTime
from rlmesh.runtime.transport import Link, Transport
from rlmesh.wire import codec, failure
from rlmesh.wire.envelope import ANY_INCARNATION, Call, Cancel, Flag, Frames, Refused, Reply, Welcome

if TYPE_CHECKING:
    from rlmesh.job.status import ExitInfo

logger = logging.getLogger(__name__)

LOSS_GRACE_S = 1.0
"""How long a member's lost connection waits for its agent's word on why, before the calls fail without it."""
CONNECT_TIMEOUT_S = 30.0
WINDOW = 1024
"""Calls to one peer that are on their way at once; more wait at the caller."""


class PendingCall:
    """One call to one peer, from ``call()`` to its answer."""

    __slots__ = ("bucket", "call_id", "chain", "deadline", "endpoint", "frames", "future", "incarnation", "member",
                 "method", "name", "since", "timer")  # fmt: skip

    def __init__(
        self, name: str, method: str, deadline: float, chain: tuple[str, ...], *, endpoint: str | None = None,
        incarnation: int = ANY_INCARNATION,
    ) -> None:  # fmt: skip
        self.name, self.method, self.deadline, self.chain = name, method, deadline, chain
        self.endpoint, self.incarnation = endpoint, incarnation
        self.member = split_name(name)
        self.since = time.monotonic()
        self.call_id = self.bucket = 0
        self.frames: Frames = []
        self.future: Future[Any] | None = None
        self.timer: GroupTimer | None = None

    def describe(self) -> str:
        return f"{self.name}.{self.method}() for {time.monotonic() - self.since:.1f} s"

    def error(self, cls: type[CallError], text: str, executed: Executed) -> CallError:
        role, rank = self.member
        return cls(text, role=role, rank=rank, method=self.method, call_id=self.call_id, executed=executed)


class _Peer:
    """A connection to one endpoint and the calls that wait for it."""

    def __init__(self, endpoint: str, channel: Channel) -> None:
        self.endpoint, self.channel = endpoint, channel
        self.pending: dict[int, PendingCall] = {}
        self.waiting: deque[PendingCall] = deque()
        self.opening: asyncio.TimerHandle | None = None


class Calls:
    """The pending calls of one runtime."""

    def __init__(self, name: str, key: bytes, loop: asyncio.AbstractEventLoop, transport: Transport) -> None:
        self._name, self._key, self._loop, self._transport = name, key, loop, transport
        self._peers: dict[str, _Peer] = {}
        self._by_link: dict[Link, _Peer] = {}
        self._by_id: dict[int, _Peer] = {}
        self._parked: dict[int, PendingCall] = {}
        self._lost: dict[str, str] = {}
        self._orphans: dict[str, _Peer] = {}
        self._dead: dict[tuple[str, int], ExitInfo] = {}
        self._book: AddressBook | None = None
        self._last_id = 0
        self._deadlines = Deadlines(loop, self._expired)
        self._closing = False

    # Starting calls.

    def start(self, call: PendingCall) -> None:
        self._last_id += 1
        call.call_id = self._last_id
        if self._closing:
            self._fail(call, call.error(ShuttingDown, f"this process is ending; {call.describe()} was not sent", "no"))
            return
        if call.future is not None:
            if call.future.done():
                return
            call.bucket = self._deadlines.add(call.call_id, call.deadline)
        self._route(call)

    def _route(self, call: PendingCall) -> None:
        try:
            endpoint = self._endpoint_of(call)
        except (RoleNotFound, PeerLost) as error:
            self._fail(call, error)
            return
        if endpoint is None:
            self._parked[call.call_id] = call
            return
        if endpoint in self._lost:
            self._fail(call, self._lost_error(call, self._lost[endpoint], "no"))
            return
        peer = self._peers.get(endpoint) or self._connect(endpoint)
        if len(peer.pending) >= WINDOW and call.future is not None:
            peer.waiting.append(call)
            self._by_id[call.call_id] = peer
        else:
            self._send(peer, call)

    def _endpoint_of(self, call: PendingCall) -> str | None:
        if call.endpoint is not None:
            return call.endpoint
        role, rank = call.member
        if self._book is None or rank is None:
            return None
        member = self._book.find(role, rank)
        if member is None:
            group = self._book.role(role)
            raise RoleNotFound(f"{role} has {len(group)} members; there is no {call.name}")
        exit_info = self._dead.get((call.name, member.incarnation))
        if exit_info is not None:
            raise self._lost_error(call, _reason(exit_info), "no")
        call.incarnation = member.incarnation
        return member.endpoint

    def _connect(self, endpoint: str) -> _Peer:
        channel = Channel(self._transport.connect(endpoint), self._loop)
        peer = _Peer(endpoint, channel)
        self._peers[endpoint] = peer
        self._by_link[channel.link] = peer
        channel.send(make_hello(self._key, self._name, endpoint), [])
        peer.opening = self._loop.call_later(CONNECT_TIMEOUT_S, self._not_opened, peer)
        return peer

    def _send(self, peer: _Peer, call: PendingCall) -> None:
        remaining = max(0.0, call.deadline - self._loop.time())
        flags = 0
        if call.future is None:
            flags = int(Flag.NO_REPLY)
        else:
            peer.pending[call.call_id] = call
            self._by_id[call.call_id] = peer
        header = Call(call.call_id, call.name, call.incarnation, call.method, remaining, flags, call.chain)
        peer.channel.send(header, call.frames)
        call.frames = []

    # What arrives.

    def channel_of(self, link: Link) -> Channel | None:
        """The channel of a link that this side opened."""
        peer = self._by_link.get(link)
        return peer.channel if peer is not None else None

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        peer = self._by_link.get(link)
        if peer is not None and peer.opening is not None:
            peer.opening.cancel()
            peer.opening = None
            peer.channel.authenticated = True
            peer.channel.peer_name = welcome.name

    def on_refused(self, link: Link, refused: Refused) -> None:
        peer = self._by_link.get(link)
        if peer is not None:
            error = VersionMismatch(f"{peer.endpoint} refused the connection: {refused.reason}")
            self._drop(peer, lambda call: error)

    def on_reply(self, link: Link, reply: Reply, frames: Frames, run_queue_ns: int) -> None:
        peer = self._by_link.get(link)
        call = peer.pending.pop(reply.call_id, None) if peer is not None else None
        if peer is None or call is None:
            return  # Cancelled or past its deadline: the answer comes too late.
        self._by_id.pop(reply.call_id, None)
        self._deadlines.remove(reply.call_id, call.bucket)
        while peer.waiting and len(peer.pending) < WINDOW:
            self._send(peer, peer.waiting.popleft())
        role, rank = call.member
        future = call.future
        value: Any = None
        error: BaseException | None = None
        try:
            value = codec.decode(frames)
            if not reply.ok:
                error = failure.rebuild(value, role=role, rank=rank, method=call.method, call_id=call.call_id)
        except Exception as broken:
            error = call.error(
                CallError, f"the answer of {call.name}.{call.method}() cannot be decoded here: "
                f"{type(broken).__name__}: {broken}", "yes",
            )  # fmt: skip
            error.__cause__ = broken
        if call.timer is not None:
            call.timer.member_done(MemberTime(rank or 0, reply.executed_ns, reply.queued_ns, reply.run_queue_ns))
        if future is not None:
            if error is not None:
                reject(future, error)
            else:
                resolve(future, value)

    # What goes wrong.

    def cancel(self, call: PendingCall) -> None:
        """The caller cancelled: forget the call and tell the peer."""
        self._parked.pop(call.call_id, None)
        peer = self._by_id.pop(call.call_id, None)
        self._deadlines.remove(call.call_id, call.bucket)
        if call.timer is not None:
            call.timer.member_done(None)
        if peer is None:
            return
        if peer.pending.pop(call.call_id, None) is not None:
            peer.channel.send(Cancel(call.call_id), [])
        elif call in peer.waiting:
            peer.waiting.remove(call)

    def _expired(self, key: Hashable) -> None:
        assert isinstance(key, int)
        call = self._parked.pop(key, None)
        executed: Executed = "no"
        state = "its member has not published an endpoint yet"
        peer = self._by_id.pop(key, None)
        if peer is not None:
            sent = peer.pending.pop(key, None)
            call = sent or next((c for c in peer.waiting if c.call_id == key), None)
            if sent is not None:
                executed = "maybe"
                state = "the member answers no more" if peer.channel.authenticated else "it is not connected"
                peer.channel.send(Cancel(key), [])
            elif call is not None:
                peer.waiting.remove(call)
                state = f"{WINDOW} calls to it were on their way"
        if call is None:
            return
        waited = time.monotonic() - call.since
        self._fail(call, call.error(
            CallTimeout, f"{call.name}.{call.method}() gave no answer within its deadline ({waited:.2f} s): {state}. "
            "Raise it with group.options(timeout_s=…), or look at the member's log and stacks", executed,
        ))  # fmt: skip

    def on_lost(self, link: Link, reason: str) -> None:
        peer = self._by_link.pop(link, None)
        if peer is None:
            return
        self._forget(peer)
        if peer.channel.peer_name.startswith("@"):
            self._drop(peer, lambda call: self._lost_error(call, reason, "maybe"))
            return
        # Its agent knows exit code, signal and last lines, and says so within milliseconds.
        self._lost[peer.endpoint] = reason
        self._orphans[peer.endpoint] = peer
        self._loop.call_later(LOSS_GRACE_S, self._give_up, peer, reason)

    def _give_up(self, peer: _Peer, reason: str) -> None:
        self._orphans.pop(peer.endpoint, None)
        self._drop(peer, lambda call: self._lost_error(call, reason, "maybe"))

    def member_lost(self, info: ExitInfo) -> None:
        """The agent's word on the end of a member's process: its calls end now, later ones at once."""
        name = member_name(info.role, info.rank)
        self._dead[name, info.incarnation] = info
        reason = _reason(info)
        for peer in [*self._peers.values(), *self._orphans.values()]:
            for call in [*peer.pending.values(), *peer.waiting]:
                if call.name == name and call.incarnation in (info.incarnation, ANY_INCARNATION):
                    executed: Executed = "maybe" if call.call_id in peer.pending else "no"
                    self._fail(call, self._lost_error(call, reason, executed))

    def set_book(self, book: AddressBook) -> None:
        """Take a newer address book; calls that waited for an endpoint go out."""
        if self._book is not None and book.version <= self._book.version:
            return
        self._book = book
        parked, self._parked = self._parked, {}
        for call in parked.values():
            self._route(call)

    @property
    def book(self) -> AddressBook | None:
        return self._book

    def pending(self) -> Iterator[PendingCall]:
        yield from self._parked.values()
        for peer in [*self._peers.values(), *self._orphans.values()]:
            yield from peer.pending.values()
            yield from peer.waiting

    def close(self) -> None:
        """Fail what is pending; queued packets still go out."""
        self._closing = True
        for call in list(self.pending()):
            self._fail(call, call.error(
                ShuttingDown, f"this process is ending; {call.describe()} got no answer", "maybe"
            ))  # fmt: skip
        for peer in self._peers.values():
            if peer.opening is not None:
                peer.opening.cancel()
            peer.channel.flush()
        self._deadlines.close()

    # The tables.

    def _not_opened(self, peer: _Peer) -> None:
        peer.opening = None
        reason = f"nobody answered at {peer.endpoint} within {CONNECT_TIMEOUT_S:.0f} s"
        self._by_link.pop(peer.channel.link, None)
        self._forget(peer)
        peer.channel.link.close()
        self._drop(peer, lambda call: self._lost_error(call, reason, "no"))

    def _forget(self, peer: _Peer) -> None:
        if peer.opening is not None:
            peer.opening.cancel()
            peer.opening = None
        if self._peers.get(peer.endpoint) is peer:
            del self._peers[peer.endpoint]

    def _drop(self, peer: _Peer, error_of: Callable[[PendingCall], BaseException]) -> None:
        for call in [*peer.pending.values(), *peer.waiting]:
            self._fail(call, error_of(call))

    def _fail(self, call: PendingCall, error: BaseException) -> None:
        peer = self._by_id.pop(call.call_id, None)
        if peer is not None:
            peer.pending.pop(call.call_id, None)
            if call in peer.waiting:
                peer.waiting.remove(call)
        self._parked.pop(call.call_id, None)
        self._deadlines.remove(call.call_id, call.bucket)
        if call.timer is not None:
            call.timer.member_done(None)
        if call.future is not None:
            reject(call.future, error)
        else:
            logger.warning("notification %s was not delivered: %s", call.describe(), error)

    def _lost_error(self, call: PendingCall, reason: str, executed: Executed) -> PeerLost:
        error = call.error(
            PeerLost, f"{call.name} cannot answer {call.method}(): {reason} [asked {call.describe()}]", executed
        )  # fmt: skip
        assert isinstance(error, PeerLost)
        error.reason = reason
        return error


def _reason(info: ExitInfo) -> str:
    """How a member ended, in one line, with its last words below."""
    where = f" on {info.hostname}" if info.hostname else ""
    text = f"{info.role} rank {info.rank} (pid {info.pid}{where}) {info.describe()}"
    if info.last_log_lines:
        text += "; its last lines:\n" + "\n".join(f"    {line}" for line in info.last_log_lines)
    return text
