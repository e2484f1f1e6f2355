"""Unix sockets: the transport between processes of one node.

On one node ZeroMQ's own threads cost more than the wire.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.runtime.stream_transport import StreamTransport
from rlmesh.runtime.transport import prepare_socket_path


class UnixTransport(StreamTransport):
    """``unix://PATH``, in a directory that only this user can enter."""

    scheme = "unix://"
    _path = ""

    def _listen(self, where: str) -> tuple[socket.socket, str]:
        prepare_socket_path(where)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(where)
            os.chmod(where, 0o600)
        except OSError as error:
            listener.close()
            raise UsageError(f"cannot listen at {where!r}: {error}") from None
        self._path = where
        return listener, where

    def _open(self, where: str) -> tuple[socket.socket, int]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        return sock, sock.connect_ex(where)

    def _who(self, accepted: socket.socket) -> str | None:
        pid, uid, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in (os.getuid(), 0):
            return f"pid {pid}"
        self.receiver.on_refused(f"user {uid}", "other user", f"pid {pid} of user {uid} connected")
        return None

    def _remove(self) -> None:
        Path(self._path).unlink(missing_ok=True)
