"""Packets over ZeroMQ: a ROUTER that listens, and a DEALER per peer that this side connects to, all under CURVE.

The loop watches the sockets' descriptors, without pyzmq's asyncio wrapper, which would cost most of the latency.
A descriptor is edge-triggered: after each event and each send the socket is drained until it would block, else an event
is lost.
"""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlmesh.errors import UsageError
from rlmesh.runtime.connections.security import CurveKeys
from rlmesh.runtime.transport.base import (
    UNAUTHENTICATED_LIMIT_BYTES,
    Link,
    PacketReceiver,
    prepare_socket_path,
)
from rlmesh.runtime.transport.half_open import TIMEOUT_S
from rlmesh.runtime.transport.zmq_listener import ListenerWatch
from rlmesh.wire.envelope import Frames

_DRAIN_LIMIT = 512
"""The most packets received in one turn, before other work of the loop gets its turn."""
_DRAIN_BYTES = 2 << 20
CHUNK_BYTES = 1 << 19
"""Largest part of a payload: ZeroMQ's thread encrypts a frame in one go, about 1 ms per MiB, which delays others."""
_LAST_DRAINS = 64
_SMALL_FRAME_BYTES = 65536
_TOO_LARGE = f"a packet above {UNAUTHENTICATED_LIMIT_BYTES} bytes came before the handshake was over"
_REFUSALS = 3
"""Failed handshakes in a row after which the peer is rejected; a listener that is just ending causes fewer."""
_SPARE_DESCRIPTORS = 64
"""Descriptors that must stay free: a socket takes a few, and its connections come later."""
_DEALER_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip


class _Dealer:
    """The link to a peer that this side connected to."""

    thread_safe = False
    here = ""
    chunk_bytes: int | None = CHUNK_BYTES

    def __init__(self, transport: ZmqTransport, endpoint: str) -> None:
        self.peer = endpoint
        self._transport = transport
        self._socket = transport.new_socket(zmq.DEALER, endpoint)
        self._monitor = self._socket.get_monitor_socket(_DEALER_EVENTS)
        self._closed = self._connected = self._trusted = False
        self._refusals = 0
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot connect to {endpoint!r}: {error}") from None
        transport.watch(self._socket, self._drain)
        transport.watch(self._monitor, self._drain_monitor)

    def send(self, frames: Frames) -> None:
        if self._closed:
            return
        _send(self._socket, frames)
        self._transport.drain_soon(self._drain)

    def trust(self) -> None:
        self._trusted = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._transport.unwatch(self._socket)
        self._transport.unwatch(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        # Packets for a connection that was never made would only keep the context from ending.
        self._socket.close(self._transport.linger_ms if self._connected else 0)
        self._transport.forget(self)

    def _drain(self) -> None:
        left = _DRAIN_BYTES
        for _ in range(_DRAIN_LIMIT):
            if self._closed:
                return
            parts = _receive(self._socket)
            if parts is None:
                return
            frames = _frames(parts)
            left -= len(frames[-1])
            if self._trusted or _is_small(frames):
                self._transport.receiver.on_packet(self, frames)
            else:
                self.close()
                self._transport.receiver.on_rejected(self, _TOO_LARGE)
            if left < 0:
                break
        self._transport.drain_soon(self._drain)

    def _drain_monitor(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event != zmq.EVENT_DISCONNECTED:
                self._refused()
            elif self._connected:
                # The peer's last packets must be handled before its loss.
                self._drain()
                if not self._closed:
                    self.close()
                    self._transport.receiver.on_lost(self, "the connection was closed by the peer")

    def _refused(self) -> None:
        """Count a failed handshake, and reject the peer after several: ZeroMQ retries by itself."""
        self._refusals += 1
        if self._refusals == _REFUSALS:
            self.close()
            detail = (
                f"the process that listens at {self.peer} refuses the encrypted handshake: it does not hold the key of "
                "this job, or is no process of rlmesh"
            )
            self._transport.receiver.on_rejected(self, detail, "wrong key")


class _RouterPeer:
    """The link to a peer that connected to this side."""

    thread_safe = False
    chunk_bytes: int | None = CHUNK_BYTES

    def __init__(self, transport: ZmqTransport, routing_id: bytes, descriptor: int, peer: str) -> None:
        self.peer, self.descriptor, self.routing_id = peer, descriptor, routing_id
        self.here = transport.endpoint
        self.trusted = False
        self._transport = transport

    def send(self, frames: Frames) -> None:
        self._transport.send_routed(self, frames)

    def trust(self) -> None:
        self.trusted = True
        self._transport.admit(self)

    def close(self) -> None:
        self._transport.end(self)


_of_parents: list[object] = []
"""Inherited transports, which must not be collected in a forked child."""


class ZmqTransport:
    """The transport over ZeroMQ, with one context per runtime. Made and used on the runtime's loop."""

    def __init__(self, receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, keys: CurveKeys) -> None:
        self.receiver = receiver
        self.linger_ms = 0
        self.endpoint = ""
        self._loop, self._keys = loop, keys
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 4096)
        self._context.setsockopt(zmq.IO_THREADS, 2)  # Encryption of large payloads keeps one of them busy.
        self._router: zmq.Socket[bytes] | None = None
        self._watch: ListenerWatch | None = None
        self._routed: dict[bytes, _RouterPeer] = {}
        self._by_descriptor: dict[int, _RouterPeer] = {}
        self._dealers: set[_Dealer] = set()
        self._drains: dict[Any, None] = {}
        self._socket_file: str | None = None

    def bind(self, address: str) -> str:
        if self._router is not None:
            raise UsageError(f"this runtime listens already, at {self._router.getsockopt_string(zmq.LAST_ENDPOINT)}")
        if address.startswith("ipc://"):
            prepare_socket_path(address.removeprefix("ipc://"))
        router = self.new_socket(zmq.ROUTER, address)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._watch = ListenerWatch(router, self._loop, self.receiver.on_refused, self._on_left)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            self._watch.close()
            self._watch = None
            router.close(0)
            raise UsageError(f"cannot listen at {address!r}: {error}") from None
        self._router = router
        self.watch(router, self._drain_router)
        self.watch(self._watch.monitor, self._watch.drain)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if endpoint.startswith("ipc://"):
            self._socket_file = endpoint.removeprefix("ipc://")
        self.endpoint = endpoint
        return endpoint

    def connect(self, endpoint: str) -> Link:
        dealer = _Dealer(self, endpoint)
        self._dealers.add(dealer)
        return dealer

    def idle(self) -> bool:
        return True  # ZeroMQ does not report what it has not sent yet.

    def close(self, linger_s: float) -> None:
        self.linger_ms = int(linger_s * 1000)
        for dealer in list(self._dealers):
            dealer.close()
        if self._watch is not None:
            self.unwatch(self._watch.monitor)
            self._watch.close()
            self._watch = None
        if self._router is not None:
            self.unwatch(self._router)
            self._router.close(self.linger_ms)
            self._router = None
        self._routed.clear()
        self._by_descriptor.clear()
        self._context.term()  # Waits for lingering packets, at most linger_s.
        if self._socket_file is not None:
            # ZeroMQ leaves the file of an ipc endpoint behind when its context ends with the socket.
            Path(self._socket_file).unlink(missing_ok=True)

    def forked(self) -> None:
        """In a forked child, only keep the inherited objects alive: ZeroMQ itself protects the parent's sockets."""
        _of_parents.append(self)

    # For the links of this module.

    def new_socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        _check_descriptors(address)
        socket = self._context.socket(kind)
        # The runtime applies back-pressure (windows per peer), so ZeroMQ must never drop or block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.BACKLOG, 1024)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(TIMEOUT_S * 1000))
        socket.setsockopt(zmq.IPV6, int("[" in address))
        listener_public, listener_secret = self._keys.listener
        if kind == zmq.ROUTER:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = listener_public, listener_secret
        else:
            socket.curve_serverkey = listener_public
            socket.curve_publickey, socket.curve_secretkey = self._keys.caller
        return socket

    def watch(self, socket: zmq.Socket[bytes], drain: Any) -> None:
        self._loop.add_reader(_descriptor(socket), drain)
        self.drain_soon(drain)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(_descriptor(socket))

    def drain_soon(self, drain: Any) -> None:
        if not self._drains:
            self._loop.call_soon(self._run_drains)
        self._drains[drain] = None

    def _run_drains(self) -> None:
        drains, self._drains = list(self._drains), {}
        for drain in drains:
            drain()

    def forget(self, dealer: _Dealer) -> None:
        self._dealers.discard(dealer)

    def send_routed(self, link: _RouterPeer, frames: Frames) -> None:
        if self._router is None or self._routed.get(link.routing_id) is not link:
            return
        try:
            _send(self._router, [link.routing_id, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lost(link)
            return
        self.drain_soon(self._drain_router)

    def admit(self, link: _RouterPeer) -> None:
        if self._watch is not None:
            self._watch.admit(link.descriptor)

    def end(self, link: _RouterPeer) -> None:
        """Close the connection of a peer."""
        if self._drop(link) and self._watch is not None:
            self._watch.end(link.descriptor)

    def _drop(self, link: _RouterPeer) -> bool:
        if self._routed.get(link.routing_id) is not link:
            return False
        del self._routed[link.routing_id]
        if self._by_descriptor.get(link.descriptor) is link:
            del self._by_descriptor[link.descriptor]
        return True

    def _lost(self, link: _RouterPeer) -> None:
        if self._drop(link):
            self.receiver.on_lost(link, "the connection was closed by the peer")

    def _on_left(self, descriptor: int) -> None:
        link = self._by_descriptor.get(descriptor)
        if link is None:
            return
        for _ in range(_LAST_DRAINS):  # The peer's last packets come before its loss.
            if not self._receive_some(_DRAIN_LIMIT):
                break
        self._lost(link)

    def _drain_router(self) -> None:
        if self._receive_some(_DRAIN_LIMIT):
            self.drain_soon(self._drain_router)

    def _receive_some(self, limit: int) -> bool:
        """Receive up to ``limit`` packets, or a few large ones; True if there may be more."""
        left = _DRAIN_BYTES
        for _ in range(limit):
            parts = _receive(self._router) if self._router is not None else None
            if parts is None:
                return False
            routing_id = parts[0].bytes
            link = self._routed.get(routing_id)
            if link is None:
                link = self._new_peer(routing_id, parts)
            frames = _frames(parts[1:])
            if link.trusted or _is_small(frames):
                self.receiver.on_packet(link, frames)
            else:
                self.end(link)
                self.receiver.on_rejected(link, _TOO_LARGE)
            left -= len(parts[-1])
            if left < 0:
                break
        return True

    def _new_peer(self, routing_id: bytes, parts: list[zmq.Frame]) -> _RouterPeer:
        assert self._watch is not None
        self._watch.drain()  # The monitor reports a connection before its first packet comes.
        descriptor = int(parts[-1].get(zmq.SRCFD))
        link = _RouterPeer(self, routing_id, descriptor, self._watch.peer_of(descriptor))
        self._routed[routing_id] = self._by_descriptor[descriptor] = link
        return link


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _check_descriptors(address: str) -> None:
    """Check for free descriptors before a socket is made: without one, an assertion in libzmq ends the process.

    Raises:
        UsageError: this process has too few descriptors left for a socket to ``address``.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = len(os.listdir("/proc/self/fd"))
    if used + _SPARE_DESCRIPTORS > limit:
        raise UsageError(
            f"process {os.getpid()} has {used} of {limit} file descriptors open, too few are left for a ZeroMQ socket "
            f"({address}), which would end the process: raise the limit (`ulimit -n`, LimitNOFILE=) or close files"
        )


def _send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    # A large frame is not copied, since the copy would cost more than the bookkeeping of a shared frame.
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if number < last else 0)
        socket.send(frame, flags, copy=len(frame) < _SMALL_FRAME_BYTES)


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def _is_small(frames: Frames) -> bool:
    return sum(len(frame) for frame in frames) <= UNAUTHENTICATED_LIMIT_BYTES


def _frames(parts: list[zmq.Frame]) -> Frames:
    return [part.buffer if len(part) >= _SMALL_FRAME_BYTES else part.bytes for part in parts]
