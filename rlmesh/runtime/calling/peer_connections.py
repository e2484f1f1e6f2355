"""The connections that calls take: how they are opened, and how their calls end when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlmesh.errors import CallError, UsageError, WireError
from rlmesh.runtime.calling.peer_table import PeerTable
from rlmesh.runtime.calling.pending import Peer, PendingCall
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.process import clock
from rlmesh.runtime.transport.base import Link

LOSS_GRACE_S = 1.0
"""After a member's connection was lost, its calls wait so long for its agent's report before they fail without it."""
CONNECT_TIMEOUT_S = 30.0
WINDOW = 1024
"""The number of calls to one peer that may be in flight at once; more where a method of the peer declares that it runs
many at once (`Concurrency`). As many again wait at the caller before a plain thread that calls is blocked. A loop is
never blocked; its calls wait."""


class PeerConnections:
    """Opens connections and ends the calls of lost ones. On the runtime's loop.

    Args:
        peers: the table in which the connections are.
        connect: starts to connect to an address.
        shake_hands: starts the handshake with the listener at an address.
        fail: ends a call with an error.
        route_parked: sends parked calls if there is nothing left to wait for.
    """

    def __init__(
        self, peers: PeerTable, loop: asyncio.AbstractEventLoop, post: Callable[..., None],
        connect: Callable[[str], Link], shake_hands: Callable[[Channel, str], None],
        fail: Callable[[PendingCall, BaseException], None], route_parked: Callable[[], None],
    ) -> None:  # fmt: skip
        self._peers, self._loop, self._post, self._fail, self._route_parked = peers, loop, post, fail, route_parked
        self._connect_link, self._shake_hands = connect, shake_hands

    def connection_for(self, call: PendingCall, endpoint: str) -> Peer | None:
        """The connection to an endpoint, made if there is none; None if that fails, which fails the call."""
        if endpoint in self._peers.lost:
            self._fail(call, call.lost(self._peers.lost[endpoint], "no"))
            return None
        try:
            return self._peers.by_endpoint.get(endpoint) or self._connect(endpoint)
        except Exception as error:  # An invalid address, or no descriptor is left.
            text = f"{call.describe()} was not sent: {endpoint}: {type(error).__name__}: {error}"
            self._fail(call, error if isinstance(error, UsageError) else call.error(CallError, text, "no"))
            return None

    def _connect(self, endpoint: str) -> Peer:
        channel = Channel(self._connect_link(endpoint), self._post)
        peer = Peer(endpoint, channel, WINDOW)
        self._peers.by_link[channel.link] = peer
        self._shake_hands(channel, endpoint)
        peer.opening = clock.Timer(self._loop, CONNECT_TIMEOUT_S, self._not_opened, peer)
        with self._peers.lock:
            self._peers.by_endpoint[endpoint] = peer
        return peer

    def on_admitted(self, link: Link) -> None:
        """Stop the timer of a connection whose handshake is over."""
        peer = self._peers.by_link.get(link)
        if peer is not None:
            self._stop_timer(peer)

    def on_stranger(self, link: Link, error: WireError) -> None:
        """Fail the calls to a listener that is not part of this job. None of them was sent to it."""
        peer = self._peers.by_link.pop(link, None)
        if peer is not None:
            self._forget(peer)
            self._drop(peer, lambda call: type(error)(f"{call.name}.{call.method}() was not sent: {error}"))

    def on_lost(self, link: Link, reason: str) -> None:
        """Fail the calls of a lost connection, once its member's agent has reported or `LOSS_GRACE_S` has passed."""
        peer = self._peers.by_link.pop(link, None)
        if peer is None:
            return
        self._forget(peer)
        if peer.channel.peer_name.startswith("@"):
            self._drop(peer, lambda call: call.lost(reason, peer.begun()))
            return
        # The agent knows exit code, signal and last lines, and reports them within milliseconds.
        with self._peers.lock:
            self._peers.lost[peer.endpoint] = reason
            self._peers.orphans[peer.endpoint] = peer
        clock.Timer(self._loop, LOSS_GRACE_S, self._give_up, peer, reason)

    def close(self) -> None:
        """Stop all timers, and send what is queued."""
        for peer in self._peers.by_endpoint.values():
            self._stop_timer(peer)
            peer.channel.flush()

    def _give_up(self, peer: Peer, reason: str) -> None:
        if self._peers.is_ending(peer):
            clock.Timer(self._loop, LOSS_GRACE_S, self._give_up, peer, reason)
            return
        self._peers.orphans.pop(peer.endpoint, None)
        self._drop(peer, lambda call: call.lost(reason, peer.begun()))
        self._route_parked()

    def _not_opened(self, peer: Peer) -> None:
        peer.opening = None
        reason = f"nobody answered at {peer.endpoint} within {CONNECT_TIMEOUT_S:.0f} s"
        self._peers.by_link.pop(peer.channel.link, None)
        self._forget(peer)
        peer.channel.link.close()
        self._drop(peer, lambda call: call.lost(reason, "no"))

    def _forget(self, peer: Peer) -> None:
        self._stop_timer(peer)
        with self._peers.lock:
            if self._peers.by_endpoint.get(peer.endpoint) is peer:
                del self._peers.by_endpoint[peer.endpoint]

    @staticmethod
    def _stop_timer(peer: Peer) -> None:
        if peer.opening is not None:
            peer.opening.cancel()
            peer.opening = None

    def _drop(self, peer: Peer, error_of: Callable[[PendingCall], BaseException]) -> None:
        for call in self._peers.calls_of(peer):
            self._fail(call, error_of(call))
