"""Byte streams between two processes that share a secret: plain TCP, and ZeroMQ under CURVE.

A pipe carries buffers whose sizes both ends know, in one direction, without frames of its own. All waits are bounded;
errors are OSError. On plain TCP the bytes of each call are followed by a keyed tag, so that the receiver refuses bytes
that anybody on the network has changed, added or repeated (`rlmesh.wire.key_proof`).
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlmesh.runtime.process import clock
from rlmesh.runtime.transport.inet import family_of, join_host_port, split_host_port
from rlmesh.wire.key_proof import HASH_BYTES, NONCE_BYTES, MessageTags, is_equal, keyed_hash, make_nonce

if TYPE_CHECKING:
    import zmq

SLICE_S = 0.05
"""Interval at which a waiting sender checks whether it was stopped."""
PART_BYTES = 512 << 10
MAX_STRANGERS = 64


class Pipe(Protocol):
    def send(self, buffers: Sequence[memoryview], timeout_s: float, stopped: Callable[[], bool]) -> None:
        """Send all buffers; raises StoppedSending as soon as ``stopped`` returns True."""
        ...

    def receive(self, buffers: Sequence[memoryview], timeout_s: float) -> None:
        """Fill all buffers."""
        ...

    def close(self) -> None: ...


class StoppedSending(OSError):
    """A sink has failed, so no sink waits for the rest."""


class AlteredBytes(ConnectionError):
    """The bytes that arrived are not the bytes that the source sent."""


class PlainPipe:
    """TCP, with a handshake in which each side proves that it knows the secret."""

    def __init__(self, connection: socket.socket, secret: bytes, nonces: bytes) -> None:
        self._socket, self._tags = connection, MessageTags(keyed_hash(secret, b"rlm-bytes", nonces))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, address: str, secret: bytes, timeout_s: float) -> PlainPipe:
        """Connect; this side proves itself first."""
        connection = socket.create_connection(split_host_port(address), timeout_s)
        try:
            theirs = _read(connection, NONCE_BYTES)
            mine = make_nonce()
            connection.sendall(keyed_hash(secret, b"rlm-sink", theirs + mine) + mine)
            if not is_equal(_read(connection, HASH_BYTES), keyed_hash(secret, b"rlm-source", theirs + mine)):
                raise ConnectionError(f"the process that listens at {address} does not know the session's secret")
        except BaseException:
            connection.close()
            raise
        return cls(connection, secret, theirs + mine)

    def send(self, buffers: Sequence[memoryview], timeout_s: float, stopped: Callable[[], bool]) -> None:
        end, tag = clock.now() + timeout_s, self._tags.begin()
        self._socket.settimeout(SLICE_S)
        for buffer in buffers:
            data = buffer.cast("B")
            for at in range(0, data.nbytes, PART_BYTES):
                part = data[at : at + PART_BYTES]
                tag.update(part)
                self._send(part, end, stopped)
        self._send(memoryview(tag.digest()), end, stopped)

    def _send(self, rest: memoryview, end: float, stopped: Callable[[], bool]) -> None:
        while rest.nbytes:
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                _go_on(end, stopped)

    def receive(self, buffers: Sequence[memoryview], timeout_s: float) -> None:
        end, tag = clock.now() + timeout_s, self._tags.begin()
        for buffer in buffers:
            self._receive(buffer.cast("B"), end, tag)
        theirs = bytearray(tag.digest_size)
        self._receive(memoryview(theirs), end, None)
        if not is_equal(theirs, tag.digest()):
            raise AlteredBytes(
                "the weights that arrived are not the weights that were sent: somebody on the network may be changing "
                "bytes. They are dropped; without RLMESH_PRIVATE_NETWORK the connection is encrypted"
            )

    def _receive(self, rest: memoryview, end: float, tag: hmac.HMAC | None) -> None:
        while rest.nbytes:
            self._socket.settimeout(max(1e-3, end - clock.now()))
            try:
                count = self._socket.recv_into(rest)
            except TimeoutError:
                if clock.now() < end:
                    continue  # the socket's timeout counts a suspension of this process, the deadline does not
                raise
            if not count:
                raise ConnectionResetError("the source closed the connection")
            if tag is not None:
                tag.update(rest[:count])
            rest = rest[count:]

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side closed first
        self._socket.close()


class PlainListener:
    """Accepts the one peer that knows the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._socket = socket.create_server((host, 0), family=family_of(host), backlog=MAX_STRANGERS)
        self.address = join_host_port(host, self._socket.getsockname()[1])

    def accept(self, timeout_s: float) -> PlainPipe:
        end = clock.now() + timeout_s
        for _ in range(MAX_STRANGERS):
            self._socket.settimeout(max(1e-3, end - clock.now()))
            connection, _ = self._socket.accept()
            try:
                # A silent stranger delays others for a second.
                connection.settimeout(1.0)
                mine = make_nonce()
                connection.sendall(mine)
                answer = _read(connection, HASH_BYTES + NONCE_BYTES)
                proof, nonces = answer[:HASH_BYTES], mine + answer[HASH_BYTES:]
                if is_equal(proof, keyed_hash(self._secret, b"rlm-sink", nonces)):
                    connection.sendall(keyed_hash(self._secret, b"rlm-source", nonces))
                    self.close()
                    return PlainPipe(connection, self._secret, nonces)
            except OSError:
                pass
            connection.close()
        raise ConnectionError(f"{MAX_STRANGERS} strangers connected, and no sink")

    def close(self) -> None:
        self._socket.close()


class CurvePipe:
    """A pair of ZeroMQ sockets under CURVE."""

    def __init__(self, context: zmq.Context[Any], pair: zmq.Socket[Any]) -> None:
        self._context, self._pair = context, pair

    @classmethod
    def to(cls, address: str, secret: bytes, timeout_s: float) -> CurvePipe:
        from rlmesh.runtime.connections.security import CurveKeys

        context, pair = _make_pair()
        keys = CurveKeys(secret)
        pair.curve_serverkey = keys.listener[0]
        pair.curve_publickey, pair.curve_secretkey = keys.caller
        pair.connect(f"tcp://{address}")
        pair.send(b"here")
        pipe = cls(context, pair)
        try:
            _wait(pair, timeout_s, "the source's answer")
        except OSError:
            pipe.close()
            raise
        pair.recv()
        return pipe

    def send(self, buffers: Sequence[memoryview], timeout_s: float, stopped: Callable[[], bool]) -> None:
        import zmq

        end = clock.now() + timeout_s
        for buffer in buffers:
            data = buffer.cast("B")
            for at in range(0, data.nbytes, PART_BYTES):
                while not self._pair.poll(int(SLICE_S * 1000), zmq.POLLOUT):
                    _go_on(end, stopped)
                self._pair.send(data[at : at + PART_BYTES], zmq.NOBLOCK, copy=True)

    def receive(self, buffers: Sequence[memoryview], timeout_s: float) -> None:
        end = clock.now() + timeout_s
        for buffer in buffers:
            data = buffer.cast("B")
            for at in range(0, data.nbytes, PART_BYTES):
                _wait(self._pair, end - clock.now(), "more bytes")
                part = self._pair.recv(copy=False).buffer
                if not part.nbytes:
                    raise ConnectionResetError("the source closed the connection")
                data[at : at + PART_BYTES] = part

    def close(self) -> None:
        import zmq

        if not self._pair.closed:
            try:
                self._pair.send(b"", zmq.NOBLOCK)  # ZeroMQ does not report that a peer has gone
            except zmq.ZMQError:
                pass
            self._pair.close(linger=200)
            self._context.term()


class CurveListener:
    """Accepts the one peer that knows the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        from rlmesh.runtime.connections.security import CurveKeys

        self._context, self._pair = _make_pair()
        keys = CurveKeys(secret)
        self._pair.curve_server = True
        self._pair.curve_publickey, self._pair.curve_secretkey = keys.listener
        self._pair.ipv6 = ":" in host
        bare = f"[{host}]" if ":" in host else host
        self.address = join_host_port(host, self._pair.bind_to_random_port(f"tcp://{bare}"))
        self._accepted = False

    def accept(self, timeout_s: float) -> CurvePipe:
        _wait(self._pair, timeout_s, "the sink")
        self._pair.recv()
        self._pair.send(b"here")
        self._accepted = True
        return CurvePipe(self._context, self._pair)

    def close(self) -> None:
        if not self._accepted and not self._pair.closed:
            self._pair.close(linger=0)
            self._context.term()


def _make_pair() -> tuple[zmq.Context[Any], zmq.Socket[Any]]:
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    pair = context.socket(zmq.PAIR)
    pair.setsockopt(zmq.SNDHWM, 16)
    pair.setsockopt(zmq.RCVHWM, 16)
    return context, pair


def _wait(pair: Any, timeout_s: float, what: str) -> None:
    due = clock.now() + timeout_s
    while not pair.poll(int(max(0.0, due - clock.now()) * 1000)):
        if clock.now() >= due - 1e-3:
            raise TimeoutError(f"{what} did not come in time")


def _go_on(end: float, stopped: Callable[[], bool]) -> None:
    if stopped():
        raise StoppedSending("a sink has failed")
    if clock.now() >= end:
        raise TimeoutError("the sink did not take the bytes in time")


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        data += part
    return data
