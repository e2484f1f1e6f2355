"""The transport over Unix sockets, between processes of one node.

On one node ZeroMQ's own threads would cost more than the transfer.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.runtime.transport.base import make_again, prepare_socket_path
from rlmesh.runtime.transport.stream_transport import StreamTransport

logger = logging.getLogger(__name__)

CHECK_S = 1.0
TOUCH_EVERY = 3600
"""Checks between two updates of the socket's times, which show cleaners of temporary files that it is in use."""


class UnixTransport(StreamTransport):
    """``unix://PATH``, in a directory that only this user can enter.

    Connections outlive the socket's file, but no process can connect once the file was removed. So the transport
    checks the file and binds the socket again if the file is missing.
    """

    scheme = "unix://"
    _path = ""
    _checks = 0
    _missing = False

    def bind(self, address: str) -> str:
        endpoint = super().bind(address)
        self.loop.call_later(CHECK_S, self._check)
        return endpoint

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

    def _check(self) -> None:
        if self._closed:
            return
        self._checks += 1
        try:
            if self._checks % TOUCH_EVERY == 0:
                os.utime(self._path)
            else:
                os.lstat(self._path)
        except FileNotFoundError:
            self._bind_again()
        except OSError:
            pass  # the file exists
        self.loop.call_later(CHECK_S, self._check)

    def _bind_again(self) -> None:
        try:
            make_again(os.path.dirname(self._path))
            self._serve(self._listen(self._path)[0])
        except (OSError, UsageError) as error:
            if not self._missing:
                logger.error(
                    "the socket %s was removed and cannot be made again: %s. No process can connect to this one any "
                    "more; set TMPDIR to a folder that is not cleaned", self._path, error,
                )  # fmt: skip
            self._missing = True
            return
        self._missing = False
        logger.warning(
            "the socket %s was removed, perhaps by a cleaner of temporary files, and was made again", self._path
        )

    def _open(self, where: str) -> tuple[socket.socket, int]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        return sock, sock.connect_ex(where)

    def _peer_of(self, accepted: socket.socket) -> str | None:
        pid, uid, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in (os.getuid(), 0):
            return f"pid {pid}"
        self.receiver.on_refused(f"user {uid}", "other user", f"pid {pid} of user {uid} connected")
        return None

    def _remove(self) -> None:
        Path(self._path).unlink(missing_ok=True)
