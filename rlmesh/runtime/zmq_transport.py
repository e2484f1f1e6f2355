"""Packets over ZeroMQ: a ROUTER that listens, a DEALER per peer that was connected to.

The sockets are driven by their descriptors, without pyzmq's asyncio wrapper, which costs most of the latency.
A descriptor is edge-triggered: whenever it fires, and after each send, the socket is drained until it would
block, else an event is lost.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlmesh.errors import UsageError
from rlmesh.runtime.transport import Link, Receiver
from rlmesh.wire.envelope import Frames

logger = logging.getLogger(__name__)

_DRAIN_LIMIT = 512
"""Packets taken in one turn before other work of the loop gets its turn."""
_SMALL_FRAME_BYTES = 65536


class _Dealer:
    """The link to a peer that this side connected to."""

    thread_safe = False

    def __init__(self, transport: ZmqTransport, endpoint: str) -> None:
        self.peer = endpoint
        self._transport = transport
        self._socket = transport.new_socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._closed = False
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
        pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._transport.unwatch(self._socket)
        self._transport.unwatch(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(self._transport.linger_ms)
        self._transport.forget(self)

    def _drain(self) -> None:
        for _ in range(_DRAIN_LIMIT):
            if self._closed:
                return
            frames = _receive(self._socket)
            if frames is None:
                return
            self._transport.receiver.on_packet(self, frames)
        self._transport.drain_soon(self._drain)

    def _drain_monitor(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                # What the peer sent before it went must be seen before its loss is.
                self._drain()
                if not self._closed:
                    self.close()
                    self._transport.receiver.on_lost(self, "the connection was closed by the peer")


class _RouterPeer:
    """The link to a peer that connected to this side."""

    thread_safe = False

    def __init__(self, transport: ZmqTransport, routing_id: bytes) -> None:
        self.peer = f"peer {routing_id.hex()}"
        self._transport = transport
        self._routing_id = routing_id

    def send(self, frames: Frames) -> None:
        self._transport.send_routed(self, self._routing_id, frames)

    def trust(self) -> None:
        pass

    def close(self) -> None:
        self._transport.drop_routed(self._routing_id)


class ZmqTransport:
    """One context per runtime. Create and use it on the runtime's loop."""

    def __init__(self, receiver: Receiver, loop: asyncio.AbstractEventLoop) -> None:
        self.receiver = receiver
        self.linger_ms = 0
        self._loop = loop
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 4096)
        self._router: zmq.Socket[bytes] | None = None
        self._routed: dict[bytes, _RouterPeer] = {}
        self._dealers: set[_Dealer] = set()
        self._drains: dict[Any, None] = {}
        self._socket_file: str | None = None

    def bind(self, address: str) -> str:
        if self._router is not None:
            raise UsageError(f"this runtime listens already, at {self._router.getsockopt_string(zmq.LAST_ENDPOINT)}")
        router = self.new_socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(0)
            raise UsageError(f"cannot listen at {address!r}: {error} (a socket path holds at most 107 bytes)") from None
        self._router = router
        self.watch(router, self._drain_router)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if endpoint.startswith("ipc://"):
            self._socket_file = endpoint.removeprefix("ipc://")
        return endpoint

    def connect(self, endpoint: str) -> Link:
        dealer = _Dealer(self, endpoint)
        self._dealers.add(dealer)
        return dealer

    def close(self, linger_s: float) -> None:
        self.linger_ms = int(linger_s * 1000)
        for dealer in list(self._dealers):
            dealer.close()
        if self._router is not None:
            self.unwatch(self._router)
            self._router.close(self.linger_ms)
            self._router = None
        self._routed.clear()
        self._context.term()  # Waits for what lingers, so at most linger_s.
        if self._socket_file is not None:
            # ZeroMQ leaves the file of an ipc endpoint behind when its context ends with the socket.
            Path(self._socket_file).unlink(missing_ok=True)

    # For the links of this module.

    def new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # Back-pressure is the runtime's business (windows per peer), so ZeroMQ must never drop or block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
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

    def send_routed(self, link: _RouterPeer, routing_id: bytes, frames: Frames) -> None:
        if self._router is None or routing_id not in self._routed:
            return
        try:
            _send(self._router, [routing_id, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._routed[routing_id]
            self.receiver.on_lost(link, "the peer is no longer connected")
            return
        self.drain_soon(self._drain_router)

    def drop_routed(self, routing_id: bytes) -> None:
        self._routed.pop(routing_id, None)

    def _drain_router(self) -> None:
        for _ in range(_DRAIN_LIMIT):
            if self._router is None:
                return
            frames = _receive(self._router)
            if frames is None:
                return
            routing_id = bytes(frames[0])
            link = self._routed.get(routing_id)
            if link is None:
                link = self._routed[routing_id] = _RouterPeer(self, routing_id)
            self.receiver.on_packet(link, frames[1:])
        self.drain_soon(self._drain_router)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    # Without a copy only where the copy would cost more than the bookkeeping of a shared frame.
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if number < last else 0)
        socket.send(frame, flags, copy=len(frame) < _SMALL_FRAME_BYTES)


def _receive(socket: zmq.Socket[bytes]) -> Frames | None:
    try:
        parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return [part.buffer if len(part) >= _SMALL_FRAME_BYTES else part.bytes for part in parts]
