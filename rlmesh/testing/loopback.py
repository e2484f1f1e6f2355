"""A transport without sockets: packets pass from runtime to runtime within one process.

::

    network = LoopbackNetwork()
    options = NetworkOptions(transports=network.transports)
    async with Runtime.open(name="A:0", key=key, bind="loop://a", network=options) as a: ...

It keeps the guarantees of a transport: packets of one link arrive in order and whole, and lost peers are reported.
The runtimes may have different loops and threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rlmesh.errors import UsageError
from rlmesh.runtime.transport.base import (
    PACKET_LIMIT_BYTES,
    UNAUTHENTICATED_LIMIT_BYTES,
    Link,
    PacketReceiver,
    TransportFactory,
)
from rlmesh.runtime.transport.half_open import HalfOpen
from rlmesh.wire.envelope import Frames

RETRY_S = 0.02


class LoopbackNetwork:
    """The addresses of one process. ``transports`` is an argument of `NetworkOptions`."""

    def __init__(self) -> None:
        self.listeners: dict[str, _LoopbackTransport] = {}

    @property
    def transports(self) -> Mapping[str, TransportFactory]:
        return {"loop": self._make}

    def _make(
        self, receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
    ) -> _LoopbackTransport:
        return _LoopbackTransport(self, receiver, loop, post)

    def disconnect(self, endpoint: str) -> None:
        """Break all connections to ``endpoint``; both sides get ``on_lost``."""
        listener = self.listeners[endpoint]
        listener.post(listener.break_accepted, "the connection was broken by the test")


class _LoopbackLink:
    """One end of a connection."""

    thread_safe = True
    chunk_bytes: int | None = None
    here = ""

    def __init__(self, transport: _LoopbackTransport, peer: str) -> None:
        self.peer = peer
        self.transport = transport
        self.other: _LoopbackLink | None = None
        self._early: list[Frames] = []
        self._limit_bytes = UNAUTHENTICATED_LIMIT_BYTES
        self._closed = False

    def join(self, other: _LoopbackLink) -> None:
        """Connect to the other end, and send the packets that waited for it. Called on the connecting side's loop."""
        self.other = other
        early, self._early = self._early, []
        for frames in early:
            self._pass(other, frames)

    def send(self, frames: Frames) -> None:
        if self._closed:
            return
        # The receiver owns its copy, as behind a socket.
        copied: Frames = [bytes(frame) if len(frame) < 4096 else bytearray(frame) for frame in frames]
        if self.other is None:
            self.transport.post(self._send_later, copied)
        else:
            self._pass(self.other, copied)

    def _send_later(self, frames: Frames) -> None:
        if self.other is not None:
            self._pass(self.other, frames)
        else:
            self._early.append(frames)

    @staticmethod
    def _pass(other: _LoopbackLink, frames: Frames) -> None:
        other.transport.post(other.arrive, frames)

    def trust(self) -> None:
        self._limit_bytes = PACKET_LIMIT_BYTES
        self.transport.half_open.discard(self)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.transport.forget(self)
        if self.other is not None:
            self.other.transport.post(self.other.lost, "the connection was closed by the peer")

    # On the loop of this end.

    def arrive(self, frames: Frames) -> None:
        if self._closed:
            return
        size = sum(len(frame) for frame in frames)
        if size > self._limit_bytes:
            self.close()
            self.transport.receiver.on_rejected(
                self, f"a packet of {size} bytes is above the limit of {self._limit_bytes}"
            )
        else:
            self.transport.receiver.on_packet(self, frames)

    def lost(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self.transport.forget(self)
            self.transport.receiver.on_lost(self, reason)


class _LoopbackTransport:
    def __init__(
        self,
        network: LoopbackNetwork,
        receiver: PacketReceiver,
        loop: asyncio.AbstractEventLoop,
        post: Callable[..., None],
    ) -> None:
        self.receiver, self.post = receiver, post
        self.half_open: HalfOpen[_LoopbackLink] = HalfOpen(loop, self._evict)
        self._network, self._loop = network, loop
        self._links: dict[_LoopbackLink, None] = {}
        self._accepted: dict[_LoopbackLink, None] = {}
        self._address: str | None = None
        self._closed = False

    def bind(self, address: str) -> str:
        if address in self._network.listeners:
            raise UsageError(f"the address {address} is in use")
        self._network.listeners[address] = self
        self._address = address
        return address

    def connect(self, endpoint: str) -> Link:
        link = _LoopbackLink(self, endpoint)
        self._links[link] = None
        self._try_connect(link, endpoint)
        return link

    def idle(self) -> bool:
        return True

    def close(self, linger_s: float) -> None:
        self._closed = True
        self.half_open.close()
        for link in list(self._links):
            link.close()
        if self._address is not None:
            self._network.listeners.pop(self._address, None)

    def forked(self) -> None:
        self._closed = True

    def forget(self, link: _LoopbackLink) -> None:
        self._links.pop(link, None)
        self._accepted.pop(link, None)
        self.half_open.discard(link)

    def break_accepted(self, reason: str) -> None:
        for link in list(self._accepted):
            link.close()
            self.receiver.on_lost(link, reason)

    def _try_connect(self, link: _LoopbackLink, endpoint: str) -> None:
        if self._closed or link not in self._links:
            return
        listener = self._network.listeners.get(endpoint)
        if listener is None:
            self._loop.call_later(RETRY_S, self._try_connect, link, endpoint)
            return
        accepted = _LoopbackLink(listener, "a caller")
        accepted.other = link
        listener.post(listener.accept, accepted)
        link.join(accepted)

    def accept(self, link: _LoopbackLink) -> None:
        if self._closed:
            link.close()
            return
        self._links[link] = self._accepted[link] = None
        self.half_open.add(link)

    def _evict(self, link: _LoopbackLink, detail: str) -> None:
        link.close()
        self.receiver.on_rejected(link, detail, "half-open")
