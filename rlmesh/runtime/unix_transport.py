"""Unix sockets: the transport between processes of one node.

On one node ZeroMQ's own threads cost more than the wire.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.runtime.half_open import HalfOpen
from rlmesh.runtime.stream import StreamLink
from rlmesh.runtime.transport import Link, Receiver, prepare_socket_path

logger = logging.getLogger(__name__)

SCHEME = "unix://"
RETRY_S = 0.02
ACCEPT_PAUSE_S = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class UnixTransport:
    """Use it on the runtime's loop, except for `Link.send`."""

    def __init__(
        self, receiver: Receiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None]
    ) -> None:
        self.receiver, self.loop, self.post = receiver, loop, post
        self._listener: socket.socket | None = None
        self._path = ""
        self._links: dict[StreamLink, None] = {}
        self._half_open: HalfOpen[StreamLink] = HalfOpen(loop, self._evict)
        self._closed = False

    def bind(self, address: str) -> str:
        path = address.removeprefix(SCHEME)
        prepare_socket_path(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(4096)
        except OSError as error:
            listener.close()
            raise UsageError(f"cannot listen at {path!r}: {error}") from None
        listener.setblocking(False)
        self._listener, self._path = listener, path
        self.loop.add_reader(listener.fileno(), self._on_connection)
        return SCHEME + path

    def connect(self, endpoint: str) -> Link:
        link = StreamLink(self, endpoint)
        self._links[link] = None
        self._try_connect(link, endpoint.removeprefix(SCHEME))
        return link

    def close(self, linger_s: float) -> None:
        self._closed = True
        self._half_open.close()
        deadline = time.monotonic() + linger_s
        for link in list(self._links):
            link.drain_blocking(deadline)
            link.close()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            Path(self._path).unlink(missing_ok=True)

    # For its links.

    def trusted(self, link: StreamLink) -> None:
        self._half_open.discard(link)

    def forget(self, link: StreamLink) -> None:
        self._links.pop(link, None)
        self._half_open.discard(link)

    def _try_connect(self, link: StreamLink, path: str) -> None:
        """A member may publish its address before the peer's file system shows it; a full queue passes too. The
        runtime's connect timeout bounds the retries."""
        if self._closed or link not in self._links:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex(path)
        if code == 0:
            link.attach(sock)
            return
        sock.close()
        if code in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.EINTR):
            self.loop.call_later(RETRY_S, self._try_connect, link, path)
        else:
            link.close()
            self.loop.call_soon(self.receiver.on_lost, link, f"cannot connect: {os.strerror(code)}")

    def _on_connection(self) -> None:
        while self._listener is not None:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (os.getuid(), 0):
                sock.close()
                self.receiver.on_refused(f"user {uid}", "other user", f"pid {pid} of user {uid} connected")
                continue
            link = StreamLink(self, f"pid {pid}")
            self._links[link] = None
            link.attach(sock)
            self._half_open.add(link)

    def _cannot_accept(self, error: OSError) -> None:
        """Out of descriptors, perhaps by strangers: they make room. Otherwise the loop would call again at once."""
        assert self._listener is not None
        if error.errno in _FULL and self._half_open.evict_oldest():
            return
        self.receiver.on_refused("somebody", "no room", f"a connection at {self._path} cannot be accepted: {error}")
        self.loop.remove_reader(self._listener.fileno())
        self.loop.call_later(ACCEPT_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener.fileno(), self._on_connection)

    def _evict(self, link: StreamLink, detail: str) -> None:
        link.close()
        self.receiver.on_rejected(link, detail, "half-open")
