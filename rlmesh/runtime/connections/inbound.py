"""`Inbound`: how packets come in. Handshakes first, then each message goes to the part that handles it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from rlmesh.errors import AuthenticationFailed, MalformedFrame, WireError
from rlmesh.runtime.calling.call_stats import own_run_queue_since_last_ns
from rlmesh.runtime.calling.calls import Calls
from rlmesh.runtime.calling.peer_connections import CONNECT_TIMEOUT_S
from rlmesh.runtime.connections.bulk_channels import BulkChannels
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.connections.handshake import Authenticator
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.connections.shm_transfer import ShmTransfer
from rlmesh.runtime.connections.transports import Transports
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.dispatch import Dispatcher
from rlmesh.runtime.serving.reply_backlog import CHECK_S, LARGE_BYTES
from rlmesh.runtime.transport.base import Link, Rejection
from rlmesh.runtime.transport.stream import StreamLink
from rlmesh.wire.envelope import (
    Call,
    Cancel,
    Concurrency,
    Credit,
    Frames,
    Header,
    Item,
    Keep,
    Release,
    Reply,
    ShmPlace,
    SlotReleases,
    StoredReply,
    TakenReplies,
    unpack,
)

logger = logging.getLogger(__name__)


class Inbound:
    """Receives the packets of one runtime. All methods run on the runtime's loop.

    Args:
        name: of the runtime, for messages.
        key: the job's secret.
        calls, dispatcher, shm, authenticator, transports: the parts that handle messages.

    Attributes:
        channels: the channels of connections that peers made, and of those that carry payloads only.
        bulk: the second connections, for large payloads.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, post: Callable[..., None], network: NetworkOptions,
        key: bytes, calls: Calls, dispatcher: Dispatcher, shm: ShmTransfer, authenticator: Authenticator,
        transports: Transports,
    ) -> None:  # fmt: skip
        self.post = post
        self.channels: dict[Link, Channel] = {}
        self._name, self._loop, self._network = name, loop, network
        self._calls, self._peers, self._connections = calls, calls.peers, calls.connections
        self._dispatcher, self._shm, self._authenticator = dispatcher, shm, authenticator
        self._transports = transports
        self.bulk = BulkChannels(self, loop, network, key)

    def forked(self, inherited: Any) -> None:
        """In a forked child: replace the parent's parts by an object that raises on any use (`Inherited`)."""
        self._calls = self._peers = self._connections = self._dispatcher = self._shm = self.bulk = inherited

    # Packets.

    def on_packet(self, link: Link, frames: Frames) -> None:
        run_queue_ns = own_run_queue_since_last_ns()
        peer = self._peers.by_link.get(link)
        channel = peer.channel if peer is not None else self.channels.get(link)
        if channel is None:
            channel = self.channels[link] = Channel(link, self.post)
        try:
            if not channel.authenticated:
                # Not even the headers of a stranger are decoded.
                if self._authenticator.on_packet(channel, frames):
                    self._on_admitted(channel, link)
                return
            if channel.unseal is not None:
                for header, payload in unpack(channel.unseal(frames)):
                    self.bulk.on_carried(channel, header, payload)
                return
            messages = unpack(frames, partial(self._shm.open_refs, channel=channel))
            if len(messages) > 1:
                self._dispatcher.defer_starts()
            for header, payload in messages:
                if channel.bulk_receiver is not None and channel.bulk_receiver.holds(header, payload):
                    continue
                self._on_message(channel, link, header, payload, run_queue_ns)
        except WireError as error:
            self._reject(channel, link, error)
        except Exception as error:
            # One message must never stop the transport from reading the next ones.
            logger.exception("%s failed on a packet from %s", self._name, channel.peer_name)
            if isinstance(error, MemoryError) or not channel.authenticated:
                # The peer waits for an answer to what is lost here. It learns from the closed connection.
                link.close()
                self.on_lost(link, f"{type(error).__name__} on a packet of this connection")
        finally:
            if self._dispatcher.starting is not None:
                self._dispatcher.start_deferred()

    def _on_message(self, channel: Channel, link: Link, header: Any, payload: Frames, run_queue_ns: int) -> None:
        kind = type(header)
        if kind is Reply:
            self._calls.on_reply(link, header, payload)
            if len(payload) != 1 or len(payload[0]) >= LARGE_BYTES:  # Others are not counted.
                self._report_taken(channel, payload)
        elif kind is Call:
            self._dispatcher.on_call(channel, header, payload, run_queue_ns)
        elif kind is Cancel:
            self._dispatcher.on_cancel(channel, header.call_id)
        elif kind is ShmPlace:
            if self._network.share_memory:
                self._shm.on_place(channel, header)
        elif kind is SlotReleases:
            self._shm.on_releases(channel, header)
        elif kind is Item:
            self._calls.on_item(link, header, payload)
            if len(payload) != 1 or len(payload[0]) >= LARGE_BYTES:
                self._report_taken(channel, payload)
        elif kind is TakenReplies:
            for incoming in channel.backlog.on_taken(header.total):
                self._dispatcher.start(incoming)
        elif kind is Credit:
            self._dispatcher.on_credit(channel, header)
        elif kind is Keep:
            self._dispatcher.on_keep(channel, header.call_id)
        elif kind is StoredReply:
            self._calls.on_stored_reply(link, header)
        elif kind is Release:
            self._dispatcher.results.release(link, header.token)
        elif kind is Concurrency:
            self._calls.on_concurrency(link, header)
        else:
            self.bulk.on_message(channel, header, payload)

    def _report_taken(self, channel: Channel, answer: Frames) -> None:
        """Tell a peer now and then how many of its large answers were taken in."""
        if count := channel.backlog.on_received(answer):
            channel.send(TakenReplies(count), [])

    def _on_admitted(self, channel: Channel, link: Link) -> None:
        called = link.peer if link in self._peers.by_link else None
        if self.bulk.admitted(channel, called=called, here=link.here or self._authenticator.endpoint):
            return
        self._connections.on_admitted(link)
        if self._network.share_memory:
            self._shm.announce(channel)

    # Peers that do not read.

    def watch_backlog(self, channel: Channel) -> None:
        """Check, from now on, whether a peer that is behind takes its answers in; cut it off if it does not."""
        if not channel.backlog.watched:
            channel.backlog.watched = True
            self._loop.call_later(CHECK_S, self._check_backlog, channel)

    def _check_backlog(self, channel: Channel) -> None:
        backlog, now = channel.backlog, clock.now()
        backlog.watched = False
        if self.channels.get(channel.link) is not channel or not backlog.is_behind:
            return
        if backlog.is_stuck(now):
            what = backlog.describe(now)
            logger.error("%s cuts %s off: %s", self._name, channel.peer_name, what)
            self.end(channel, f"it was cut off: {what}")
        else:
            self.watch_backlog(channel)

    # Second connections for large payloads.

    def deliver(self, channel: Channel, header: Header, payload: Frames) -> None:
        """Handle a message whose payload came over another connection."""
        self._on_message(channel, channel.link, header, payload, 0)

    def order_of(self, call: Call) -> Hashable | None:
        return self._dispatcher.order_of(call)

    def connect_bulk(self, endpoint: str, name: str) -> Channel:
        transports = self._transports
        is_plain = endpoint.startswith("plain://")
        link = transports.plain().connect(endpoint) if is_plain else transports.connect(endpoint)
        channel = self.channels[link] = Channel(link, self.post)
        self._authenticator.begin(channel, endpoint, name)
        clock.Timer(self._loop, CONNECT_TIMEOUT_S, self._bulk_not_opened, channel, endpoint)
        return channel

    def _bulk_not_opened(self, channel: Channel, endpoint: str) -> None:
        if not channel.authenticated and self.channels.get(channel.link) is channel:
            self.end(channel, f"nobody answered at {endpoint} within {CONNECT_TIMEOUT_S:.0f} s")

    def is_plain(self, link: Link) -> bool:
        return isinstance(link, StreamLink) and link.scheme == "plain://"

    def listen_plain(self, host: str) -> int:
        return int(self._transports.plain().bind(f"plain://{host}:0").rpartition(":")[2])

    # Connections that end.

    def end(self, channel: Channel, reason: str) -> None:
        channel.link.close()
        self.on_lost(channel.link, reason)

    def _reject(self, channel: Channel, link: Link, error: WireError, reason: Rejection | None = None) -> None:
        """End a connection whose packets cannot be trusted or understood; calls that wait for its answers fail now."""
        self._authenticator.count_rejected(channel, error, reason)
        link.close()
        if not channel.authenticated:
            self._connections.on_stranger(link, error)
        self.on_lost(link, str(error))

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        peer = self._peers.by_link.get(link)
        channel = peer.channel if peer is not None else self.channels.get(link) or Channel(link, self.post)
        error: WireError = AuthenticationFailed(detail) if reason == "wrong key" else MalformedFrame(detail)
        self._reject(channel, link, error, reason)

    def on_refused(self, peer: str, reason: Rejection, detail: str) -> None:
        self._authenticator.strangers.note(peer, reason, detail)

    def on_lost(self, link: Link, reason: str) -> None:
        peer = self._peers.by_link.get(link)
        own = self.channels.pop(link, None)
        channels = [channel for channel in (peer.channel if peer is not None else None, own) if channel is not None]
        for channel in channels:
            self._shm.lost(channel)
        if own is not None:
            self._dispatcher.on_lost(own)
        self._connections.on_lost(link, reason)
        for channel in channels:
            self.bulk.lost(channel)
