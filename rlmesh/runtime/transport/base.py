"""The contract between the runtime and whatever moves packets. Three verbs: bind, connect, send."""

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
"""A peer that has not shown the job's key may send no larger packet."""
PACKET_LIMIT_BYTES = 1 << 40

_PATH_LIMIT_BYTES = 107

TRANSPORT_VARIABLE = "RLMESH_TRANSPORT"


def local_address(socket_dir: str | Path | None, name: str | None = None) -> str:
    """An address for a process of this node: a Unix socket in ``socket_dir``, or ZeroMQ's ipc where
    ``RLMESH_TRANSPORT=zmq`` asks for it; loopback TCP without a directory.

    Args:
        name: name of the socket's file; None makes one up.
    """
    if socket_dir is None:
        return "tcp://127.0.0.1:*"
    scheme = "ipc" if os.environ.get(TRANSPORT_VARIABLE) == "zmq" else "unix"
    return f"{scheme}://{socket_dir}/{name or secrets.token_hex(4)}"


def prepare_socket_path(path: str) -> None:
    """Make sure that a socket may be bound at ``path``: nobody else may put one where a job's processes look for each
    other's, and one whose listener has ended is removed.

    Raises:
        UsageError: the path is too long, its directory is open to others or not there, or somebody listens there.
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
        raise UsageError(f"cannot listen at {path!r}: somebody listens there already")
    if code == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode):
        os.unlink(path)


def make_again(directory: str) -> None:
    """Make a folder of sockets that was removed, by a cleaner of temporary files for one, and the one above it.

    Raises:
        OSError: it cannot be made, or somebody else made one there.
    """
    above = os.path.dirname(directory)
    for path in (above, directory):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid in ((os.getuid(), 0) if path == above else (os.getuid(),))
        others = 0 if path == above and found.st_mode & stat.S_ISVTX else found.st_mode & 0o022
        if not ours or others or (path == directory and found.st_mode & 0o077):
            raise OSError(errno.EPERM, "somebody else has made one there, or may change it", path)


Rejection = Literal[
    "no greeting", "wrong key", "other version", "half-open", "other user", "no room", "malformed packet"
]
"""What was wrong with a connection, as it is counted."""


class Link(Protocol):
    """One connection to one peer; packets go both ways."""

    thread_safe: bool
    """Whether `send` may be called from any thread; otherwise on the runtime's loop only."""

    here: str
    """The address of this side that the peer connected to; empty where this side connected."""

    chunk_bytes: int | None
    """Larger packets keep other links from their turns: they are better cut; None where they do not."""

    @property
    def peer(self) -> str:
        """The peer's address, for messages."""
        ...

    def send(self, frames: Frames) -> None:
        """Queue one packet; never blocks. Packets of one link arrive in order and whole, or not at all."""
        ...

    def trust(self) -> None:
        """The peer has shown the job's key. Until then a packet above `UNAUTHENTICATED_LIMIT_BYTES`, or too long a
        silence, ends the connection. On the runtime's loop."""
        ...

    def close(self) -> None:
        """On the runtime's loop."""
        ...


class PacketReceiver(Protocol):
    """What a transport calls, on the runtime's loop."""

    def on_packet(self, link: Link, frames: Frames) -> None: ...

    def on_rejected(self, link: Link, detail: str, reason: Rejection | None = None) -> None:
        """The peer sent what is no packet (or, with ``reason``, did something else that is not taken); the
        connection has been closed."""
        ...

    def on_refused(self, peer: str, reason: Rejection, detail: str) -> None:
        """A connection was closed before it became a link."""
        ...

    def on_lost(self, link: Link, reason: str) -> None:
        """The peer is gone, or the connection is. Called at most once per link, never for a link closed here."""
        ...


class Transport(Protocol):
    def bind(self, address: str) -> str:
        """Listen; gives the address that peers connect to (with the port that the system chose)."""
        ...

    def connect(self, endpoint: str) -> Link:
        """Start to connect; packets sent before it is established are kept."""
        ...

    def idle(self) -> bool:
        """Whether all that was sent has left, as far as this side knows."""
        ...

    def close(self, linger_s: float) -> None:
        """Send what is queued for at most ``linger_s`` seconds, then close everything."""
        ...

    def forked(self) -> None:
        """In a forked child: let go of what is open, without a word to the peers and without removing anything."""
        ...


class TransportFactory(Protocol):
    """Makes a runtime's transport, on the runtime's loop.

    Args:
        receiver: takes what arrives.
        loop: the runtime's.
        post: runs a function on that loop, from any thread.
        key: the job's, for a transport that encrypts.
    """

    def __call__(
        self, receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
    ) -> Transport: ...
