"""A link with what the protocol adds: messages of one loop turn in one packet, and the opening handshake."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets

from rlmesh.errors import AuthenticationFailed, VersionMismatch
from rlmesh.runtime.transport import Link
from rlmesh.wire.envelope import PROTOCOL_VERSION, Frames, Header, Hello, Message, pack


class Channel:
    """Queues messages and sends all that are ready in one turn of the loop as one packet, at the turn's end."""

    __slots__ = ("_loop", "_outbox", "authenticated", "link", "peer_name")

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self.link = link
        self.authenticated = False
        self.peer_name = link.peer
        self._loop = loop
        self._outbox: list[Message] = []

    def send(self, header: Header, frames: Frames) -> None:
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append((header, frames))

    def flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self.link.send(pack(messages))


def make_hello(key: bytes, name: str, endpoint: str) -> Hello:
    nonce = secrets.token_bytes(16)
    return Hello(PROTOCOL_VERSION, name, nonce, _proof(key, name, endpoint, nonce))


def check_hello(hello: Hello, key: bytes, endpoint: str) -> None:
    """Raises:
    AuthenticationFailed: the peer does not hold the key.
    VersionMismatch: it does, but speaks another version.
    """
    if not hmac.compare_digest(hello.proof, _proof(key, hello.name, endpoint, hello.nonce)):
        raise AuthenticationFailed(f"{hello.name!r:.60} does not hold the key of this job")
    if hello.version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{hello.name!r:.60} speaks version {hello.version} of the protocol, this side {PROTOCOL_VERSION}: "
            "install the same version of rlmesh on all nodes"
        )


def _proof(key: bytes, name: str, endpoint: str, nonce: bytes) -> bytes:
    text = b"\0".join((nonce, name.encode(), endpoint.encode()))
    return hashlib.blake2b(text, key=key, digest_size=32).digest()
