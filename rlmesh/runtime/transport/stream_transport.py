"""The transport over stream sockets (listening, connecting, accepting), the base of Unix sockets and plain TCP."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from rlmesh.errors import UsageError
from rlmesh.runtime.transport.base import Link, PacketReceiver
from rlmesh.runtime.transport.half_open import HalfOpen
from rlmesh.runtime.transport.stream import StreamLink

RETRY_S = 0.02
ACCEPT_PAUSE_S = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TRY_AGAIN = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.EINTR)


class StreamTransport(ABC):
    """A transport over stream sockets; subclasses make the sockets. Used on the runtime's loop, except `Link.send`."""

    scheme: str

    def __init__(self, receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None]) -> None:
        self.receiver, self.loop, self.post = receiver, loop, post
        self._listener: socket.socket | None = None
        self._endpoint = ""
        self._links: dict[StreamLink, None] = {}
        self._half_open: HalfOpen[StreamLink] = HalfOpen(loop, self._evict)
        self._closed = False

    # For subclasses.

    @abstractmethod
    def _listen(self, where: str) -> tuple[socket.socket, str]:
        """A bound socket and its address."""

    @abstractmethod
    def _open(self, where: str) -> tuple[socket.socket, int]:
        """A connecting socket and the result of `connect_ex`."""

    @abstractmethod
    def _peer_of(self, accepted: socket.socket) -> str | None:
        """The name of a connection's peer; None after the peer was refused."""

    def _remove(self) -> None:  # noqa: B027
        """Remove files that the listening socket leaves behind; the default removes nothing."""

    # The interface of transports.

    def bind(self, address: str) -> str:
        if self._listener is not None:
            raise UsageError(f"this runtime listens already; it cannot listen at {address!r} too")
        listener, where = self._listen(address.removeprefix(self.scheme))
        self._serve(listener)
        self._endpoint = self.scheme + where
        return self._endpoint

    def _serve(self, listener: socket.socket) -> None:
        """Accept connections at a listener, in place of the earlier listener."""
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
        listener.listen(4096)
        listener.setblocking(False)
        self._listener = listener
        self.loop.add_reader(listener.fileno(), self._on_connection)

    def connect(self, endpoint: str) -> Link:
        link = StreamLink(self, endpoint)
        self._links[link] = None
        self._try_connect(link, endpoint.removeprefix(self.scheme))
        return link

    def idle(self) -> bool:
        return all(link.idle for link in self._links)

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
            self._remove()

    def forked(self) -> None:
        """In a forked child, close its sockets, without the loop, whose epoll the parent shares."""
        self._closed = True
        for link in list(self._links):
            link.forked()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # For its links.

    def trusted(self, link: StreamLink) -> None:
        self._half_open.discard(link)

    def forget(self, link: StreamLink) -> None:
        self._links.pop(link, None)
        self._half_open.discard(link)

    # Connecting.

    def _try_connect(self, link: StreamLink, where: str) -> None:
        """Try to connect once; errors that may pass are retried until the runtime's connect timeout.

        Errors that may pass: this process does not see the member's socket file yet although it knows the address, or
        the member's accept queue is full.
        """
        if self._closed or link not in self._links:
            return
        try:
            sock, code = self._open(where)
        except OSError as error:  # No descriptor is left.
            link.close()
            self.loop.call_soon(self.receiver.on_lost, link, f"cannot connect: {error}")
            return
        if code == errno.EINPROGRESS:
            self.loop.add_writer(sock.fileno(), self._on_connected, link, where, sock)
        else:
            self._tried(link, where, sock, code)

    def _on_connected(self, link: StreamLink, where: str, sock: socket.socket) -> None:
        self.loop.remove_writer(sock.fileno())
        self._tried(link, where, sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _tried(self, link: StreamLink, where: str, sock: socket.socket, code: int) -> None:
        if code == 0 and link in self._links:
            link.attach(sock)
            return
        sock.close()
        if link not in self._links:
            return
        if code in _TRY_AGAIN:
            self.loop.call_later(RETRY_S, self._try_connect, link, where)
        else:
            link.close()
            self.loop.call_soon(self.receiver.on_lost, link, f"cannot connect: {os.strerror(code)}")

    # Accepting.

    def _on_connection(self) -> None:
        while self._listener is not None:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            peer = self._peer_of(sock)
            if peer is None:
                sock.close()
                continue
            link = StreamLink(self, peer, self._endpoint)
            self._links[link] = None
            link.attach(sock)
            self._half_open.add(link)

    def _cannot_accept(self, error: OSError) -> None:
        """Handle a failed accept: close the oldest stranger if descriptors ran out, else pause, so as not to spin."""
        assert self._listener is not None
        if error.errno in _FULL and self._half_open.evict_oldest():
            return
        self.receiver.on_refused("somebody", "no room", f"a connection cannot be accepted: {error}")
        self.loop.remove_reader(self._listener.fileno())
        self.loop.call_later(ACCEPT_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener.fileno(), self._on_connection)

    def _evict(self, link: StreamLink, detail: str) -> None:
        link.close()
        self.receiver.on_rejected(link, detail, "half-open")
