"""Peers that do not belong to the job: raw connections, and conversations that are recorded and said again."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.own_time import HANG_S

SCHEMES = ("unix", "ipc", "tcp")


@contextmanager
def address_of(scheme: str, name: str = "a") -> Iterator[str]:
    """An address to bind, in a private directory."""
    if scheme == "tcp":
        yield "tcp://127.0.0.1:*"
        return
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        yield f"{scheme}://{directory}/{name}"


def connect(endpoint: str) -> socket.socket:
    """A plain connection to a listening runtime."""
    scheme, _, where = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(5)
    stranger.connect(where)
    return stranger


def say(endpoint: str, data: bytes) -> None:
    """Say something and wait until the listener hangs up."""
    with connect(endpoint) as stranger:
        try:
            stranger.sendall(data)
            while stranger.recv(65536):
                pass
        except TimeoutError:
            raise AssertionError(f"{endpoint} took {data[:20]!r}… and did not hang up") from None
        except OSError:
            pass  # It was thrown out before it had said all.


class Recorder:
    """Sits between a listener and those who connect to it, and keeps what they say.

    A Unix socket's path is part of the greeting, so the recorder takes over the path itself; on TCP it has a port
    of its own. ``endpoint`` is where to connect.
    """

    def __init__(self, endpoint: str) -> None:
        self.said = bytearray()
        scheme, _, where = endpoint.partition("://")
        if scheme == "tcp":
            self._target = endpoint
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._moved, self._path = Path(where + ".real"), where
            os.rename(where, self._moved)
            self._target = f"{scheme}://{self._moved}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(where)
            self._listener.listen()
            self.endpoint = endpoint
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            listener = connect(self._target)
            listener.settimeout(None)
            self._sockets += [caller, listener]
            for source, sink, keep in ((caller, listener, True), (listener, caller, False)):
                thread = threading.Thread(target=self._relay, args=(source, sink, keep))
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(65536):
                if keep:
                    self.said += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        """Hang up and put the listener's path back."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(HANG_S)
        for each in self._sockets:
            each.close()
        if not self._target.startswith("tcp"):
            os.rename(self._moved, self._path)
