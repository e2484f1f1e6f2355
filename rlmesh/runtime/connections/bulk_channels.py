"""Opens the bulk channel of each channel: a second connection to the peer, for large payloads only.

The callee offers a bulk channel after the handshake (`BulkOffer`); the caller opens it when one of them has the first
large payload, and names the offer's token in the handshake of the second connection. Where the network is encrypted,
the second connection goes to the same address; where its operator declares it private, to a plain TCP port. A bulk
channel carries payloads only, and over a plain port each of its packets is sealed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rlmesh.errors import MalformedFrame
from rlmesh.runtime.connections.channel import BulkHost, Channel
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.transport.base import Link
from rlmesh.wire.envelope import Bulk, BulkOffer, BulkPart, Detached, Frames, Header, OpenBulk
from rlmesh.wire.key_proof import Seal, Side

if TYPE_CHECKING:
    from rlmesh.runtime.connections.bulk_channel import BulkLink, BulkReceiver, BulkSender

_NAME = "~lane:"
SEALED_BYTES = 1 << 20
"""Size of the parts of payloads on an unencrypted connection: a part is hashed in one go, and the loop does other work
between parts."""


class BulkChannelsHost(BulkHost, Protocol):
    """The runtime's methods that bulk channels use."""

    def post(self, fn: Callable[..., Any], *args: Any) -> None: ...

    def connect_bulk(self, endpoint: str, name: str) -> Channel:
        """Connect and begin the handshake under ``name``."""
        ...

    def listen_plain(self, host: str) -> int:
        """Listen for unencrypted bulk channels and return the port."""
        ...

    def is_plain(self, link: Link) -> bool:
        """True if a link is unencrypted TCP."""
        ...

    def end(self, channel: Channel, reason: str) -> None:
        """Close a channel; calls that wait for its answers fail."""
        ...


class _BulkChannel:
    """The bulk channel of a channel, open or not."""

    def __init__(self, channel: Channel, receiver: BulkReceiver) -> None:
        self.channel, self.receiver = channel, receiver
        self.sender: BulkSender | None = None
        self.connection: Channel | None = None
        self.offer: str | None = None


class BulkChannels:
    """The bulk channels of a runtime. Its methods run on the loop."""

    def __init__(
        self, host: BulkChannelsHost, loop: asyncio.AbstractEventLoop, options: NetworkOptions, key: bytes
    ) -> None:
        self._host, self._loop, self._options, self._key = host, loop, options, key
        self._channels: dict[Channel, _BulkChannel] = {}
        self._offers: dict[str, _BulkChannel] = {}
        self._connections: dict[Channel, _BulkChannel] = {}
        self._plain_port: int | None = None

    def admitted(self, channel: Channel, *, called: str | None, here: str | None) -> bool:
        """Handle the end of a handshake; True if the channel is the second connection of a bulk channel.

        Args:
            called: the address that this side called; None if the peer called.
            here: this side's own address.
        """
        if channel in self._connections:
            bulk = self._connections[channel]
            self._opened(bulk, "caller", str(bulk.offer))
            return True
        if channel.peer_name.startswith(_NAME):
            token = channel.peer_name.removeprefix(_NAME)
            offered = self._offers.pop(token, None)
            if offered is None:
                self._host.end(channel, "its bulk channel was not offered, or is open already")
                return True
            offered.connection = channel
            self._connections[channel] = offered
            self._opened(offered, "listener", token)
            return True
        if self._host.is_plain(channel.link):
            self._host.end(channel, "an unencrypted connection may only carry large payloads")
            return True
        address = called or here or ""
        if address.partition("://")[0] in self._options.bulk_schemes:
            self._prepare(channel, called, address)
        return False

    def lost(self, channel: Channel) -> None:
        """End the bulk channel of a lost channel, or the channel of a lost bulk channel: no call waits for ever."""
        bulk = self._connections.pop(channel, None)
        if bulk is not None:
            bulk.connection = None
            self._host.end(bulk.channel, "the connection for its large payloads was lost")
        bulk = self._channels.pop(channel, None)
        if bulk is not None:
            if bulk.offer is not None:
                self._offers.pop(bulk.offer, None)
            if bulk.connection is not None:
                self._connections.pop(bulk.connection, None)
                self._host.end(bulk.connection, "the connection that its payloads belong to was lost")

    def on_carried(self, channel: Channel, header: Header, payload: Frames) -> None:
        """Handle a message that came over a second connection, which may carry payloads only.

        Raises:
            WireError: the message is no payload, or malformed.
        """
        bulk = self._connections.get(channel)
        if bulk is None or type(header) not in (Bulk, BulkPart):
            raise MalformedFrame(f"a {type(header).__name__} came over a connection for large payloads")
        self.on_message(channel, header, payload)

    def on_message(self, channel: Channel, header: Header, payload: Frames) -> None:
        """Handle a message of the bulk channel protocol.

        Raises:
            WireError: the message is malformed or unexpected.
        """
        bulk = self._connections.get(channel) or self._channels.get(channel)
        if bulk is None:
            raise MalformedFrame(f"a {type(header).__name__} came over a connection without a bulk channel")
        if type(header) is Bulk:
            bulk.receiver.on_bulk(header, payload)
        elif type(header) is BulkPart:
            bulk.receiver.on_part(header, payload)
        elif type(header) is Detached:
            bulk.receiver.on_detached(header)
        elif type(header) is OpenBulk:
            self._open(bulk)
        elif type(header) is BulkOffer:
            self._offered(bulk, header)

    # Callee.

    def _prepare(self, channel: Channel, called: str | None, address: str) -> None:
        from rlmesh.runtime.connections.bulk_channel import BulkReceiver
        from rlmesh.runtime.transport.inet import split_host_port

        bulk = self._channels[channel] = _BulkChannel(channel, BulkReceiver(self._host, channel))
        channel.bulk_receiver = bulk.receiver
        if called is not None:
            return  # The offer tells the caller that the peer has bulk channels too.
        token, port = secrets.token_hex(16), 0
        if self._options.private and address.startswith("tcp://"):
            if self._plain_port is None:
                self._plain_port = self._host.listen_plain(split_host_port(address.removeprefix("tcp://"))[0])
            port = self._plain_port
        bulk.offer = token
        self._offers[token] = bulk
        self._divert(bulk, lambda: channel.send(OpenBulk(), []))
        channel.send(BulkOffer(token, port), [])

    # Caller.

    def _offered(self, bulk: _BulkChannel, offer: BulkOffer) -> None:
        from rlmesh.runtime.transport.inet import join_host_port, split_host_port

        if bulk.sender is not None:
            raise MalformedFrame("a bulk channel was offered twice")
        called = bulk.channel.link.peer
        if offer.port:
            host, _ = split_host_port(called.removeprefix("tcp://"))
            called = f"plain://{join_host_port(host, offer.port)}"
        bulk.offer = offer.token
        self._divert(bulk, lambda: self._open(bulk, called))

    def _open(self, bulk: _BulkChannel, endpoint: str | None = None) -> None:
        if endpoint is None:
            # The peer asked, since it has a payload to send; both sides may use the bulk channel.
            if bulk.sender is not None:
                bulk.sender.open()
            return
        if bulk.connection is None:
            bulk.connection = self._host.connect_bulk(endpoint, _NAME + str(bulk.offer))
            self._connections[bulk.connection] = bulk

    # Both sides.

    def _divert(self, bulk: _BulkChannel, open_channel: Callable[[], None]) -> None:
        from rlmesh.runtime.connections.bulk_channel import BulkSender

        bulk.sender = BulkSender(self._options.bulk_bytes, self._loop, self._host.post, open_channel)
        bulk.channel.divert = bulk.sender.divert

    def _opened(self, bulk: _BulkChannel, side: Side, token: str) -> None:
        connection = bulk.connection
        if connection is None:
            return
        link: BulkLink = connection.link
        connection.unseal = _as_it_is
        if self._host.is_plain(connection.link):
            other: Side = "caller" if side == "listener" else "listener"
            connection.unseal = Seal(self._key, token, other).open
            link = _SealedLink(connection.link, Seal(self._key, token, side))
        if bulk.sender is not None:
            bulk.sender.opened(link)


def _as_it_is(frames: Frames) -> Frames:
    return frames


class _SealedLink:
    """Seals the packets of an unencrypted connection; used on the loop, so that packets leave in their seals' order."""

    chunk_bytes = SEALED_BYTES

    def __init__(self, link: Link, seal: Seal) -> None:
        self._link, self._seal = link, seal

    def send(self, frames: Frames) -> None:
        self._link.send(self._seal.close(frames))
