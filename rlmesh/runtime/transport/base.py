"""The interface of transports, which move packets (bind, connect, send), and the rules for socket paths."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from rlmesh.errors import UsageError
from rlmesh.wire.envelope import Frames
from rlmesh.wire.handshake import LIMIT_BYTES

UNAUTHENTICATED_LIMIT_BYTES = LIMIT_BYTES
"""The largest packet of a peer that has not proved the job's key."""
PACKET_LIMIT_BYTES = 1 << 40

_PATH_LIMIT_BYTES = 107

TRANSPORT_VARIABLE = "RLMESH_TRANSPORT"


def local_address(socket_dir: str | Path | None, name: str | None = None) -> str:
    """An address for a process of this node: a Unix socket in ``socket_dir``, or ZeroMQ's ipc where
    ``RLMESH_TRANSPORT=zmq`` asks for it; loopback TCP without a directory.

    Args:
        name: name of the socket's file; None makes a random one.
    """
    if socket_dir is None:
        return "tcp://127.0.0.1:*"
    scheme = "ipc" if os.environ.get(TRANSPORT_VARIABLE) == "zmq" else "unix"
    return f"{scheme}://{socket_dir}/{name or secrets.token_hex(4)}"


def prepare_socket_path(path: str) -> None:
    """Check that a socket may be bound at ``path``, and remove a socket whose listener has ended.

    The directory must be closed to others, so that nobody else can put a socket where a job's processes connect.

    Raises:
        UsageError: the path is too long, its directory is missing or open to others, or a process listens there.
    """
    if len(os.fsencode(path)) > _PATH_LIMIT_BYTES:
        raise UsageError(
            f"the socket path {path!r} has {len(os.fsencode(path))} bytes, the system allows {_PATH_LIMIT_BYTES}: "
            "set TMPDIR or XDG_RUNTIME_DIR to a shorter directory"
        )
    directory = os.path.dirname(path) or "."
    try:
        found = os.stat(directory)
    except OSError as error:
        raise UsageError(f"cannot listen at {path!r}: {error.strerror}") from None
    if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"cannot listen at {path!r}: its directory has mode {stat.S_IMODE(found.st_mode):04o} and owner "
            f"{found.st_uid}; sockets of a job belong in a directory that only you can enter (chmod 700 {directory})"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code in (0, errno.EAGAIN):
        raise UsageError(f"cannot listen at {path!r}: another process listens there already")
    if code == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode):
        os.unlink(path)


def make_again(directory: str) -> None:
    """Make a socket folder and its parent again after they were removed, perhaps by a cleaner of temporary files.

    Raises:
        OSError: the folder cannot be made, or another user has made it or can change it.
    """
    above = os.path.dirname(directory)
    for path in (above, directory):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid in ((os.getuid(), 0) if path == above else (os.getuid(),))
        others = 0 if path == above and found.st_mode & stat.S_ISVTX else found.st_mode & 0o022
        if not ours or others or (path == directory and found.st_mode & 0o077):
            raise OSError(errno.EPERM, "another user has made it, or may change it", path)


Rejection = Literal[
    "no greeting", "wrong key", "other version", "half-open", "other user", "no room", "malformed packet"
]
"""Reasons why a connection is rejected, by which rejections are counted."""


class Link(Protocol):
    """A connection to a peer; packets go both ways."""

    thread_safe: bool
    """True if `send` may be called from any thread, False if on the runtime's loop only."""

    here: str
    """This side's address that the peer connected to; empty if this side connected."""

    chunk_bytes: int | None
    """Packets above this size should be split, since they delay other links; None: any size is fine."""

    @property
    def peer(self) -> str:
        """The peer's address, for messages."""
        ...

    def send(self, frames: Frames) -> None:
        """Queue a packet without blocking. Packets of a link arrive whole and in order, or not at all."""
        ...

    def trust(self) -> None:
        """Lift the limits for peers that have not proved the job's key; called on the runtime's loop.

        Until then a packet above `UNAUTHENTICATED_LIMIT_BYTES`, or too long a silence, ends the connection.
        """
        ...

    def close(self) -> None:
        """Close the connection; called on the runtime's loop."""
        ...


class PacketReceiver(Protocol):
    """Callbacks of a transport, called on the runtime's loop."""

    def on_packet(self, link: Link, frames: Frames) -> None: ...

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        """The transport closed a connection since the peer sent malformed bytes, or for ``reason``."""
        ...

    def on_refused(self, peer: str, reason: Rejection, detail: str) -> None:
        """The transport closed a connection before it became a link."""
        ...

    def on_lost(self, link: Link, reason: str) -> None:
        """The peer or the connection is gone. Called at most once per link, never for a link that this side closed."""
        ...


class Transport(Protocol):
    def bind(self, address: str) -> str:
        """Listen, and return the address that peers connect to (with the port that the system chose)."""
        ...

    def connect(self, endpoint: str) -> Link:
        """Start to connect; packets that are sent before the connection is established are queued."""
        ...

    def idle(self) -> bool:
        """True if all packets have left, as far as this side knows."""
        ...

    def close(self, linger_s: float) -> None:
        """Send queued packets for at most ``linger_s`` seconds, then close everything."""
        ...

    def forked(self) -> None:
        """In a forked child, close all descriptors without sending to peers or removing files."""
        ...


class TransportFactory(Protocol):
    """Makes a runtime's transport, on the runtime's loop.

    Args:
        receiver: the receiver of packets and events.
        loop: the runtime's loop.
        post: runs a function on that loop, from any thread.
        key: the job's key, for a transport that encrypts.
    """

    def __call__(
        self, receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
    ) -> Transport: ...
