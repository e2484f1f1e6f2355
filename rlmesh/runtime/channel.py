"""A link with what the protocol adds: messages of one loop turn in one packet, and the opening handshake."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable

from rlmesh.errors import AuthenticationFailed, VersionMismatch
from rlmesh.runtime.transport import PACKET_LIMIT_BYTES, Link
from rlmesh.wire.envelope import PROTOCOL_VERSION, Frames, Header, Hello, Message, pack

_PACKET_MESSAGES = 1024

turn_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Threads that run a loop of rlmesh: what they send in one turn leaves together at the turn's end."""


class Channel:
    """Sends messages from any thread, in each thread's order.

    A thread that runs one of rlmesh's loops sends what is ready in one turn as one packet, at the turn's end and
    never by a timer; a plain thread sends at once.
    """

    __slots__ = ("_lock", "_outbox", "_post", "_scheduled", "authenticated", "link", "peer_name")

    def __init__(self, link: Link, post: Callable[..., None]) -> None:
        self.link = link
        self.authenticated = False
        self.peer_name = link.peer
        self._post = post
        self._outbox: deque[Message] = deque()
        self._scheduled: set[int] = set()
        self._lock = allocate_lock()

    def accept(self, peer_name: str) -> None:
        """The peer has shown the job's key."""
        self.authenticated = True
        self.peer_name = peer_name
        self.link.limit_bytes = PACKET_LIMIT_BYTES

    def send(self, header: Header, frames: Frames) -> None:
        self.put(header, frames)
        self.kick()

    def put(self, header: Header, frames: Frames) -> None:
        """Queue a message without sending it yet; `kick` must follow. For callers that hold a lock."""
        self._outbox.append((header, frames))

    def kick(self) -> None:
        thread = threading.get_ident()
        if thread in self._scheduled:
            return
        loop = turn_loops.get(thread)
        if not self.link.thread_safe:
            self._scheduled.add(thread)
            self._post(self._flush_turn, thread)
        elif loop is not None:
            self._scheduled.add(thread)
            loop.call_soon(self._flush_turn, thread)
        else:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            outbox = self._outbox
            while outbox:
                messages = [outbox.popleft() for _ in range(min(len(outbox), _PACKET_MESSAGES))]
                self.link.send(pack(messages))

    def _flush_turn(self, thread: int) -> None:
        self._scheduled.discard(thread)
        self.flush()


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
