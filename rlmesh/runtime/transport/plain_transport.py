"""TCP without encryption, for large payloads on a network that its operator declares private.

It is several times faster than ZeroMQ under CURVE. Peers still have to prove the job's key.
"""

from __future__ import annotations

import socket

from rlmesh.errors import UsageError
from rlmesh.runtime.transport.inet import family_of, join_host_port, split_host_port
from rlmesh.runtime.transport.stream_transport import StreamTransport


class PlainTransport(StreamTransport):
    """``plain://HOST:PORT``; hosts are numeric."""

    scheme = "plain://"

    def _listen(self, where: str) -> tuple[socket.socket, str]:
        host, port = split_host_port(where)
        listener = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise UsageError(f"cannot listen at {where!r}: {error}") from None
        return listener, join_host_port(host, listener.getsockname()[1])

    def _open(self, where: str) -> tuple[socket.socket, int]:
        host, port = split_host_port(where)
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, sock.connect_ex((host, port))

    def _peer_of(self, accepted: socket.socket) -> str | None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return str(accepted.getpeername()[0])
