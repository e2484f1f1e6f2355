"""Which channels have a lane for large payloads, and how it is opened.

The side that was called offers a lane after the greeting (`LaneOffer`); the side that called opens it when one of
them has the first large payload, and names the offer's token in a greeting of its own. Where the network is
encrypted the lane leads to the same address; where its operator calls it private, to a plain TCP port. What comes
over a lane is payloads only, and over a plain port each packet of them is sealed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from rlmesh.errors import MalformedFrame
from rlmesh.runtime.connections.bulk_channel import BulkReceiver, LaneHost, LaneLink, Outgoing
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.transport.base import Link
from rlmesh.runtime.transport.inet import join_host_port, split_host_port
from rlmesh.wire.envelope import Bulk, BulkPart, Detached, Frames, Header, LaneOffer, OpenLane
from rlmesh.wire.key_proof import Seal, Side

_NAME = "~lane:"
SEALED_BYTES = 1 << 20
"""Payloads on an unencrypted connection are cut into parts of this size: each is hashed in one go, and the loop does
other things in between."""


class LanesHost(LaneHost, Protocol):
    """What lanes need of their runtime."""

    def post(self, fn: Callable[..., Any], *args: Any) -> None: ...

    def connect_lane(self, endpoint: str, name: str) -> Channel:
        """Connect and begin the greeting under ``name``."""
        ...

    def listen_plain(self, host: str) -> int:
        """A port for unencrypted lanes."""
        ...

    def is_plain(self, link: Link) -> bool:
        """Whether a link is not encrypted."""
        ...

    def end(self, channel: Channel, reason: str) -> None:
        """Close a channel; what waits for its answers fails."""
        ...


class _Lane:
    """The lane of one channel, open or not."""

    def __init__(self, channel: Channel, incoming: BulkReceiver) -> None:
        self.channel, self.incoming = channel, incoming
        self.outgoing: Outgoing | None = None
        self.carrier: Channel | None = None
        self.offer: str | None = None


class Lanes:
    """All lanes of one runtime. On the loop."""

    def __init__(self, host: LanesHost, loop: asyncio.AbstractEventLoop, options: NetworkOptions, key: bytes) -> None:
        self._host, self._loop, self._options, self._key = host, loop, options, key
        self._lanes: dict[Channel, _Lane] = {}
        self._offers: dict[str, _Lane] = {}
        self._carriers: dict[Channel, _Lane] = {}
        self._plain_port: int | None = None

    def admitted(self, channel: Channel, *, called: str | None, here: str | None) -> bool:
        """A greeting is over. True if the channel is the carrier of a lane and nothing else.

        Args:
            called: the address that this side called; None if it was called.
            here: this side's own address.
        """
        if channel in self._carriers:
            lane = self._carriers[channel]
            self._opened(lane, "caller", str(lane.offer))
            return True
        if channel.peer_name.startswith(_NAME):
            token = channel.peer_name.removeprefix(_NAME)
            offered = self._offers.pop(token, None)
            if offered is None:
                self._host.end(channel, "its lane was not offered, or is open already")
                return True
            offered.carrier = channel
            self._carriers[channel] = offered
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
        """A channel is gone: a lane and what it belongs to end together, so that nothing waits for half of them."""
        lane = self._carriers.pop(channel, None)
        if lane is not None:
            lane.carrier = None
            self._host.end(lane.channel, "the connection for its large payloads was lost")
        lane = self._lanes.pop(channel, None)
        if lane is not None:
            if lane.offer is not None:
                self._offers.pop(lane.offer, None)
            if lane.carrier is not None:
                self._carriers.pop(lane.carrier, None)
                self._host.end(lane.carrier, "the connection that it belonged to was lost")

    def on_carried(self, channel: Channel, header: Header, payload: Frames) -> None:
        """What came over the second connection, which carries payloads and nothing else.

        Raises:
            WireError: it does not fit.
        """
        lane = self._carriers.get(channel)
        if lane is None or type(header) not in (Bulk, BulkPart):
            raise MalformedFrame(f"a {type(header).__name__} came over a connection for large payloads")
        self.on_message(channel, header, payload)

    def on_message(self, channel: Channel, header: Header, payload: Frames) -> None:
        """A message that lanes are made of.

        Raises:
            WireError: it does not fit.
        """
        lane = self._carriers.get(channel) or self._lanes.get(channel)
        if lane is None:
            raise MalformedFrame(f"a {type(header).__name__} came over a connection without a lane")
        if type(header) is Bulk:
            lane.incoming.on_bulk(header, payload)
        elif type(header) is BulkPart:
            lane.incoming.on_part(header, payload)
        elif type(header) is Detached:
            lane.incoming.on_detached(header)
        elif type(header) is OpenLane:
            self._open(lane)
        elif type(header) is LaneOffer:
            self._offered(lane, header)

    # The side that was called.

    def _prepare(self, channel: Channel, called: str | None, address: str) -> None:
        lane = self._lanes[channel] = _Lane(channel, BulkReceiver(self._host, channel))
        channel.incoming = lane.incoming
        if called is not None:
            return  # It learns from the offer that the peer has lanes too.
        token, port = secrets.token_hex(16), 0
        if self._options.private and address.startswith("tcp://"):
            if self._plain_port is None:
                self._plain_port = self._host.listen_plain(split_host_port(address.removeprefix("tcp://"))[0])
            port = self._plain_port
        lane.offer = token
        self._offers[token] = lane
        self._divert(lane, lambda: channel.send(OpenLane(), []))
        channel.send(LaneOffer(token, port), [])

    # The side that called.

    def _offered(self, lane: _Lane, offer: LaneOffer) -> None:
        if lane.outgoing is not None:
            raise MalformedFrame("a lane was offered twice")
        called = lane.channel.link.peer
        if offer.port:
            host, _ = split_host_port(called.removeprefix("tcp://"))
            called = f"plain://{join_host_port(host, offer.port)}"
        lane.offer = offer.token
        self._divert(lane, lambda: self._open(lane, called))

    def _open(self, lane: _Lane, endpoint: str | None = None) -> None:
        if endpoint is None:
            # The peer asked; it sends over the lane, and so may this side.
            if lane.outgoing is not None:
                lane.outgoing.open()
            return
        if lane.carrier is None:
            lane.carrier = self._host.connect_lane(endpoint, _NAME + str(lane.offer))
            self._carriers[lane.carrier] = lane

    # Both.

    def _divert(self, lane: _Lane, open_lane: Callable[[], None]) -> None:
        lane.outgoing = Outgoing(self._options.bulk_bytes, self._loop, self._host.post, open_lane)
        lane.channel.divert = lane.outgoing.divert

    def _opened(self, lane: _Lane, side: Side, token: str) -> None:
        carrier = lane.carrier
        if carrier is None:
            return
        link: LaneLink = carrier.link
        carrier.unseal = _as_it_is
        if self._host.is_plain(carrier.link):
            other: Side = "caller" if side == "listener" else "listener"
            carrier.unseal = Seal(self._key, token, other).open
            link = _SealedLink(carrier.link, Seal(self._key, token, side))
        if lane.outgoing is not None:
            lane.outgoing.opened(link)


def _as_it_is(frames: Frames) -> Frames:
    return frames


class _SealedLink:
    """The sending half of an unencrypted carrier. On the loop, so that packets leave in the order of their seals."""

    chunk_bytes = SEALED_BYTES

    def __init__(self, link: Link, seal: Seal) -> None:
        self._link, self._seal = link, seal

    def send(self, frames: Frames) -> None:
        self._link.send(self._seal.close(frames))
