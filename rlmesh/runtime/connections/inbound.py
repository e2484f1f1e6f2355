"""Handles packets that arrive: handshakes first, then each message to whoever handles it. On the runtime's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

from rlmesh.errors import AuthenticationFailed, MalformedFrame, WireError
from rlmesh.runtime.calling.calls import CONNECT_TIMEOUT_S, Calls
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.connections.network import NetworkOptions, plain
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.scheduling_delay import own_run_queue_since_last_ns
from rlmesh.runtime.serving.reply_backlog import CHECK_S, is_large
from rlmesh.runtime.transport.base import Link, Rejection, Transport
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

if TYPE_CHECKING:
    from rlmesh.runtime.connections.bulk_channels import BulkChannels
    from rlmesh.runtime.connections.handshake import Authenticator, Strangers
    from rlmesh.runtime.connections.shm_transfer import ShmTransfer
    from rlmesh.runtime.serving.dispatch import Dispatcher

logger = logging.getLogger(__name__)


class Reception:
    """The receiving half of a `Runtime`."""

    name: str
    endpoint: str | None
    network: NetworkOptions
    strangers: Strangers
    _key: bytes
    _loop: asyncio.AbstractEventLoop
    _authenticator: Authenticator
    _calls: Calls
    _dispatcher: Dispatcher
    _shm: ShmTransfer
    _bulk: BulkChannels
    _incoming: dict[Link, Channel]
    _transports: dict[str, Transport]
    _connect: Callable[[str], Link]
    post: Callable[..., None]

    def on_packet(self, link: Link, frames: Frames) -> None:
        run_queue_ns = own_run_queue_since_last_ns()
        channel = self._calls.channel_of(link) or self._incoming.get(link)
        if channel is None:
            channel = self._incoming[link] = Channel(link, self.post)
        try:
            if not channel.authenticated:
                # Not even the headers of a stranger are decoded.
                if self._authenticator.on_packet(channel, frames):
                    self._on_admitted(channel, link)
                return
            if channel.unseal is not None:
                for header, payload in unpack(channel.unseal(frames)):
                    self._bulk.on_carried(channel, header, payload)
                return
            self._dispatcher.defer_starts()
            for header, payload in unpack(frames, partial(self._shm.open_refs, channel=channel)):
                if channel.bulk_receiver is not None and channel.bulk_receiver.holds(header, payload):
                    continue
                self._on_message(channel, link, header, payload, run_queue_ns)
        except WireError as error:
            self._reject(channel, link, error)
        except Exception:
            # One message must never stop the transport from reading the next ones.
            logger.exception("%s failed on a packet from %s", self.name, channel.peer_name)
        finally:
            self._dispatcher.start_deferred()

    def _on_message(self, channel: Channel, link: Link, header: Any, payload: Frames, run_queue_ns: int) -> None:
        kind = type(header)
        if kind is Reply:
            self._calls.on_reply(link, header, payload)
            if is_large(payload):
                self._took(channel, payload)
        elif kind is Call:
            self._dispatcher.on_call(channel, header, payload, run_queue_ns)
        elif kind is Cancel:
            self._dispatcher.on_cancel(channel, header.call_id)
        elif kind is ShmPlace:
            if self.network.share_memory:
                self._shm.on_place(channel, header)
        elif kind is SlotReleases:
            self._shm.on_releases(channel, header)
        elif kind is Item:
            self._calls.on_item(link, header, payload)
            if is_large(payload):
                self._took(channel, payload)
        elif kind is TakenReplies:
            for incoming in channel.backlog.on_taken(header.total):
                self._dispatcher.start(incoming)
        elif kind is Credit:
            self._dispatcher.on_credit(channel, header)
        elif kind is Keep:
            self._dispatcher.on_keep(channel, header.call_id)
        elif kind is StoredReply:
            self._calls.on_kept(link, header)
        elif kind is Release:
            self._dispatcher.results.release(link, header.token)
        elif kind is Concurrency:
            self._calls.on_room(link, header)
        else:
            self._bulk.on_message(channel, header, payload)

    def _took(self, channel: Channel, answer: Frames) -> None:
        if count := channel.backlog.on_received(answer):
            channel.send(TakenReplies(count), [])

    def watch_backlog(self, channel: Channel) -> None:
        """Look, from now on, whether a peer that is behind takes its answers in at last; cut it off if it does not."""
        if not channel.backlog.watched:
            channel.backlog.watched = True
            self._loop.call_later(CHECK_S, self._look_at_backlog, channel)

    def _look_at_backlog(self, channel: Channel) -> None:
        backlog, now = channel.backlog, clock.now()
        backlog.watched = False
        if self._incoming.get(channel.link) is not channel or not backlog.is_behind:
            return
        if backlog.is_stuck(now):
            what = backlog.describe(now)
            logger.error("%s cuts %s off: %s", self.name, channel.peer_name, what)
            self.end(channel, f"it was cut off: {what}")
        else:
            self.watch_backlog(channel)

    def _on_admitted(self, channel: Channel, link: Link) -> None:
        called = link.peer if self._calls.channel_of(link) is not None else None
        if self._bulk.admitted(channel, called=called, here=link.here or self.endpoint):
            return
        self._calls.on_admitted(link)
        if self.network.share_memory:
            self._shm.announce(channel)

    # For bulk channels.

    def deliver(self, channel: Channel, header: Header, payload: Frames) -> None:
        """Handle a message whose payload took another way."""
        self._on_message(channel, channel.link, header, payload, 0)

    def order_of(self, call: Call) -> Hashable | None:
        return self._dispatcher.order_of(call)

    def connect_bulk(self, endpoint: str, name: str) -> Channel:
        link = self._plain().connect(endpoint) if endpoint.startswith("plain://") else self._connect(endpoint)
        channel = self._incoming[link] = Channel(link, self.post)
        self._authenticator.begin(channel, endpoint, name)
        clock.Timer(self._loop, CONNECT_TIMEOUT_S, self._bulk_not_opened, channel, endpoint)
        return channel

    def _bulk_not_opened(self, channel: Channel, endpoint: str) -> None:
        if not channel.authenticated and self._incoming.get(channel.link) is channel:
            self.end(channel, f"nobody answered at {endpoint} within {CONNECT_TIMEOUT_S:.0f} s")

    def is_plain(self, link: Link) -> bool:
        return isinstance(link, StreamLink) and link.scheme == "plain://"

    def listen_plain(self, host: str) -> int:
        return int(self._plain().bind(f"plain://{host}:0").rpartition(":")[2])

    def _plain(self) -> Transport:
        if "plain" not in self._transports:
            self._transports["plain"] = plain(self, self._loop, self.post, self._key)
        return self._transports["plain"]

    def end(self, channel: Channel, reason: str) -> None:
        channel.link.close()
        self.on_lost(channel.link, reason)

    def _reject(self, channel: Channel, link: Link, error: WireError, reason: Rejection | None = None) -> None:
        """End a connection whose packets cannot be trusted or understood: what waits for its answers fails now."""
        self._authenticator.count_rejected(channel, error, reason)
        link.close()
        if not channel.authenticated:
            self._calls.on_stranger(link, error)
        self.on_lost(link, str(error))

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        channel = self._calls.channel_of(link) or self._incoming.get(link) or Channel(link, self.post)
        error: WireError = AuthenticationFailed(detail) if reason == "wrong key" else MalformedFrame(detail)
        self._reject(channel, link, error, reason)

    def on_refused(self, peer: str, reason: Rejection, detail: str) -> None:
        self.strangers.note(peer, reason, detail)

    def on_lost(self, link: Link, reason: str) -> None:
        called = self._calls.channel_of(link)
        channel = self._incoming.pop(link, None)
        for each in (called, channel):
            if each is not None:
                self._shm.lost(each)
        if channel is not None:
            self._dispatcher.on_lost(channel)
        self._calls.on_lost(link, reason)
        for each in (called, channel):
            if each is not None:
                self._bulk.lost(each)
