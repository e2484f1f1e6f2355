"""Somebody on the path of a plain stream of weights changes, repeats or adds bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rlmesh.weights.channels.authenticated_stream import AlteredBytes, PlainListener, PlainPipe
from tests.own_time import HANG_S

SECRET = b"s" * 32

Change = Callable[[bytes], bytes]


@contextmanager
def man_in_the_middle(address: str, change: Change) -> Iterator[str]:
    """Passes bytes on between a sink and a source, and changes those of the source after the handshake."""
    host, _, port = address.rpartition(":")
    server = socket.create_server(("127.0.0.1", 0))

    def carry() -> None:
        sink, _ = server.accept()
        with sink, socket.create_connection((host, int(port)), HANG_S) as source:
            sink.sendall(_exactly(source, 32))  # the source's nonce
            source.sendall(_exactly(sink, 64))
            sink.sendall(_exactly(source, 32))  # its proof
            rest = b""
            while part := source.recv(1 << 16):
                rest += part
            sink.sendall(change(rest))

    thread = threading.Thread(target=carry)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        thread.join(HANG_S)
        server.close()


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += connection.recv(count - len(found))
    return found


def sent_and_received(change: Change, calls: int = 2) -> list[bytes]:
    """What a sink gets of calls of 3,000 bytes each in two buffers."""
    listener = PlainListener("127.0.0.1", SECRET)
    data = [bytes([number + 1]) * 1000 + bytes([number + 101]) * 2000 for number in range(calls)]

    def send() -> None:
        pipe = listener.accept(HANG_S)
        for each in data:
            pipe.send([memoryview(each)[:1000], memoryview(each)[1000:]], HANG_S, lambda: False)
        pipe.close()

    with man_in_the_middle(listener.address, change) as address:
        sender = threading.Thread(target=send)
        sender.start()
        pipe = PlainPipe.to(address, SECRET, HANG_S)
        try:
            found = []
            for _ in range(calls):
                buffer = bytearray(3000)
                pipe.receive([memoryview(buffer)], HANG_S)
                found.append(bytes(buffer))
            return found
        finally:
            pipe.close()
            sender.join(HANG_S)


@pytest.mark.case("a06")
def test_bytes_that_nobody_touched_arrive() -> None:
    assert [(each[0], each[-1]) for each in sent_and_received(lambda sent: sent)] == [(1, 101), (2, 102)]


@pytest.mark.case("a06")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda sent: b"\xff" + sent[1:], id="the first byte"),
        pytest.param(lambda sent: sent[:2999] + b"\xff" + sent[3000:], id="the last byte of a call"),
        pytest.param(lambda sent: sent[:3031] + bytes([sent[3031] ^ 1]) + sent[3032:], id="the hash"),
        pytest.param(lambda sent: sent[:3032] * 2, id="the first call again in place of the second"),
        pytest.param(lambda sent: sent[3032:] + sent[:3032], id="two calls in another order"),
        pytest.param(lambda sent: b"new" + sent, id="bytes before"),
    ],
)
def test_bytes_that_somebody_changed_are_refused(change: Change) -> None:
    with pytest.raises(AlteredBytes, match="not the weights that were sent"):
        sent_and_received(change)
