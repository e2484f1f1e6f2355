"""Follows the connections of a listening ZeroMQ socket: new, ended and rejected ones.

ZeroMQ accepts connections by itself and reports them through a monitor, by their descriptors. The descriptors belong to
ZeroMQ, which may close and reuse them at any moment: before one is used it is duplicated, and compared with the
connection that was reported.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlmesh.runtime.transport.base import Rejection
from rlmesh.runtime.transport.half_open import HalfOpen

EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip
_EVENTS_PER_TURN = 256


class _Connection(NamedTuple):
    peer: str
    identity: tuple[Any, ...]


class ListenerWatch:
    """Follows one listening socket.

    Args:
        listener: the bound socket.
        refused: called with peer, reason and detail of a connection that ended before its handshake was over.
        left: called with the descriptor of a connection that ended.
    """

    def __init__(
        self, listener: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop,
        refused: Callable[[str, Rejection, str], None], left: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._listener, self._loop, self._refused, self._left = listener, loop, refused, left
        self.monitor = listener.get_monitor_socket(EVENTS)
        self._half_open: HalfOpen[int] = HalfOpen(loop, self._evict)
        self._connections: dict[int, _Connection] = {}
        self._admitted: set[int] = set()
        self._why: tuple[Rejection, str] | None = None

    def drain(self) -> None:
        """Handle the monitor's events, in order, since a descriptor may have been several connections meanwhile."""
        for _ in range(_EVENTS_PER_TURN):
            if self.monitor.closed:
                return
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._on_event(event["event"], int(event["value"]))
        self._loop.call_soon(self.drain)

    def peer_of(self, descriptor: int) -> str:
        found = self._connections.get(descriptor)
        return found.peer if found is not None else "a peer that left"

    def admit(self, descriptor: int) -> None:
        """Mark a connection whose peer has proved the job's key."""
        self._half_open.discard(descriptor)
        if descriptor in self._connections:
            self._admitted.add(descriptor)

    def end(self, descriptor: int) -> None:
        """Close a connection; `left` is not called for it."""
        self._half_open.discard(descriptor)
        self._admitted.discard(descriptor)
        connection = self._connections.pop(descriptor, None)
        if connection is None:
            return
        with _socket_at(descriptor) as found:
            try:
                if found is not None and _identity(found) == connection.identity:
                    found.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # The connection is gone already.

    def close(self) -> None:
        self._half_open.close()
        self._listener.disable_monitor()
        self.monitor.close(0)

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(value)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            if not self._half_open.evict_oldest():
                self._refused("somebody", "no room", f"a connection cannot be accepted: {os.strerror(value)}")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            silent = value in (errno.EAGAIN, errno.ETIMEDOUT)
            detail = f"it did not finish the encrypted handshake: {os.strerror(value)}"
            self._why = ("half-open" if silent else "no greeting", detail)
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._why = ("wrong key", "it does not hold the key of this job")
        else:
            self._why = ("no greeting", f"it does not speak this job's encrypted protocol (code {value:#x})")

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)
        connection, user = _look_at(descriptor)
        self._connections[descriptor] = connection
        if user not in (None, os.getuid(), 0):
            self.end(descriptor)
            self._refused(f"user {user}", "other user", f"{connection.peer} of user {user} connected")
            return
        self._half_open.add(descriptor)

    def _disconnected(self, descriptor: int) -> None:
        # ZeroMQ reports a failed handshake right before the connection's end, from the same thread.
        why, self._why = self._why, None
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        if descriptor not in self._admitted and why is None:
            why = ("no greeting", "it left before the handshake, or sent something else")
        self._forget(descriptor)
        if why is not None:
            self._refused(connection.peer, *why)
        self._left(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._half_open.discard(descriptor)
        self._admitted.discard(descriptor)
        self._connections.pop(descriptor, None)

    def _evict(self, descriptor: int, detail: str) -> None:
        peer = self.peer_of(descriptor)
        self.end(descriptor)
        self._refused(peer, "half-open", detail)
        self._left(descriptor)


@contextmanager
def _socket_at(descriptor: int) -> Iterator[socket.socket | None]:
    """The socket of a descriptor, which stays ZeroMQ's; None if there is none any more."""
    try:
        copy = os.dup(descriptor)
    except OSError as error:
        # Without a free descriptor, strangers must be closed all the more, so the original is used.
        copy = descriptor if error.errno == errno.EMFILE else -1
    try:
        found = socket.socket(fileno=copy) if copy >= 0 else None
    except OSError:
        found = None
        if copy not in (-1, descriptor):
            os.close(copy)
    try:
        yield found
    finally:
        if found is not None and copy == descriptor:
            found.detach()
        elif found is not None:
            found.close()


def _look_at(descriptor: int) -> tuple[_Connection, int | None]:
    """The identity of a connection and its user, if it still exists."""
    with _socket_at(descriptor) as found:
        try:
            if found is not None:
                return _Connection(_peer_text(found), _identity(found)), _user(found)
        except OSError:
            pass
    return _Connection("a peer that left at once", ()), None


def _identity(connection: socket.socket) -> tuple[Any, ...]:
    return connection.family, connection.getsockname(), connection.getpeername(), _credentials(connection)


def _credentials(connection: socket.socket) -> tuple[int, int] | None:
    """The peer's process and user of a Unix socket; None for other sockets."""
    if connection.family != socket.AF_UNIX:
        return None
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _user(connection: socket.socket) -> int | None:
    found = _credentials(connection)
    return found[1] if found is not None else None


def _peer_text(connection: socket.socket) -> str:
    """The peer's name without its port, since the log has one line per host and minute."""
    found = _credentials(connection)
    return f"pid {found[0]}" if found is not None else str(connection.getpeername()[0])
