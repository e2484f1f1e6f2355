"""Packets over a stream socket: a reader that splits bytes into packets, and a connection.

The loop reads and any thread writes, so that a call or a reply leaves without a hand-off to the loop. A thread that
waits for an answer may read in place of the loop (`StreamLink.read_here`).

Format of a packet: magic (4 bytes), number of frames (u32), the length of each (u64), the frames. Little-endian.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol, TypeVar

from rlmesh.runtime.process.descriptors import await_writable
from rlmesh.runtime.transport.base import PACKET_LIMIT_BYTES, UNAUTHENTICATED_LIMIT_BYTES, PacketReceiver
from rlmesh.runtime.transport.receive_buffers import allocate
from rlmesh.wire.envelope import Buffer, Frames

T = TypeVar("T")

_MAGIC = b"RLM1"
_HEAD = struct.Struct("<4sI")
_ONLY_BYTES = frozenset({bytes})
_BUFFER_BYTES = 1 << 18
_STRANGERS_BUFFER_BYTES = 1 << 12
_JOIN_BYTES = 1 << 16
_MAX_FRAMES = 1 << 20
_MAX_IOV = 512
_READS_PER_TURN = 16
_WRITE_TURN_BYTES = 4 << 20
"""The most bytes that a thread writes at once; the loop writes the rest, in turns."""
_SOCKET_BUFFER_BYTES = 1 << 20


class PacketReader:
    """Splits the byte stream into packets. Small frames are copied out of one buffer, large ones read in place."""

    def __init__(self) -> None:
        # The buffer is small, so that a stranger that only connects costs little, until `widen` is called.
        self._buffer = bytearray(_STRANGERS_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self.start = self.end = 0
        self._frames: Frames = []
        self._sizes: list[int] = []
        self._filled = 0

    def widen(self) -> None:
        """Make the buffer larger, for large packets and for many small ones at once."""
        if len(self._buffer) < _BUFFER_BYTES:
            wide = bytearray(_BUFFER_BYTES)
            left = self.end - self.start
            wide[:left] = self._view[self.start : self.end]
            self._buffer, self._view = wide, memoryview(wide)
            self.start, self.end = 0, left

    def space(self) -> memoryview:
        """The memory to read the next bytes into."""
        if self._sizes:
            return memoryview(self._frames[len(self._frames) - 1])[self._filled :]
        if self.start == self.end:
            self.start = self.end = 0
        elif self.end == len(self._buffer):
            left = self.end - self.start
            self._buffer[:left] = self._buffer[self.start : self.end]
            self.start, self.end = 0, left
        return self._view[self.end :]

    @property
    def has_rest(self) -> bool:
        """True if bytes were read that `next_packet` has not used: those from ``start`` to ``end`` of the buffer."""
        return self.start < self.end

    def on_read(self, count: int) -> None:
        """Account for ``count`` bytes that were read into `space`."""
        if self._sizes:
            self._filled += count
        else:
            self.end += count

    def next_packet(self, limit_bytes: int) -> Frames | None:
        """The next packet if it is complete; one at a time, since handling a packet may raise the limit for the next.

        Raises:
            ValueError: the bytes are no packet, or a packet above the limit.
        """
        if self._sizes:
            return self._fill()
        if self.end - self.start < _HEAD.size:
            return None
        magic, count = _HEAD.unpack_from(self._buffer, self.start)
        if magic != _MAGIC:
            raise ValueError(f"the stream holds {magic!r} where a packet should begin")
        if count > _MAX_FRAMES or count * 8 + _HEAD.size > min(limit_bytes, len(self._buffer)):
            raise ValueError(f"a packet of {count} frames is above this side's limit")
        body = self.start + _HEAD.size + 8 * count
        if self.end < body:
            return None
        sizes = struct.unpack_from(f"<{count}Q", self._buffer, self.start + _HEAD.size)
        total = sum(sizes)
        if total > limit_bytes:
            raise ValueError(f"a packet of {total} bytes is above the limit of {limit_bytes}")
        if body - self.start + total <= len(self._buffer):
            if self.end - body < total:
                return None
            frames: Frames = []
            for size in sizes:
                frames.append(bytes(self._view[body : body + size]))
                body += size
            self.start = body
            return frames
        return self._begin_large(body, sizes)

    def _begin_large(self, body: int, sizes: tuple[int, ...]) -> Frames | None:
        self._frames, self._sizes, self._filled = [], list(sizes), 0
        self.start = body
        while self._sizes:
            size = self._sizes[0]
            frame = memoryview(_allocate(size))
            have = min(size, self.end - self.start)
            frame[:have] = self._view[self.start : self.start + have]
            self.start += have
            self._frames.append(frame)
            if have < size:
                self._filled = have
                return None
            self._sizes.pop(0)
        frames, self._frames = self._frames, []
        return frames

    def _fill(self) -> Frames | None:
        # `space` ends with the frame that is being filled, so no byte of the next packet was read.
        while self._filled == self._sizes[0]:
            self._sizes.pop(0)
            if not self._sizes:
                frames, self._frames = self._frames, []
                return frames
            self._filled = 0
            self._frames.append(_allocate(self._sizes[0]))
        return None


def _allocate(size: int) -> Buffer:
    try:
        return allocate(size)
    except MemoryError:
        raise ValueError(f"this process has no memory for a frame of {size} bytes") from None


class LinkOwner(Protocol):
    """The transport's attributes that a stream link uses."""

    scheme: str
    loop: asyncio.AbstractEventLoop
    receiver: PacketReceiver
    post: Callable[..., None]

    def trusted(self, link: StreamLink) -> None: ...

    def forget(self, link: StreamLink) -> None: ...


class StreamLink:
    """A connection that this side made or accepted."""

    thread_safe = True
    chunk_bytes: int | None = None

    def __init__(self, owner: LinkOwner, peer: str, here: str = "") -> None:
        self.peer, self.scheme, self.here = peer, owner.scheme, here
        self._owner = owner
        self._limit_bytes = UNAUTHENTICATED_LIMIT_BYTES
        self._socket: socket.socket | None = None
        self._reader = PacketReader()
        self._lock = allocate_lock()
        self._backlog: deque[memoryview] = deque()
        self._writing = self._closed = False
        self._reading = RLock()
        """Held while reading and while closing, so that a reader's descriptor is not reused for another file."""
        self._unhandled: Frames | None = None
        """A packet that a waiting thread read and that the loop must handle before it reads on."""
        self._left_bytes = False
        """A waiting thread read bytes that it did not use."""

    def attach(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        with self._lock:
            self._socket = sock
            waiting = bool(self._backlog)
        self._owner.loop.add_reader(sock.fileno(), self._on_readable)
        if waiting:
            self._want_write()

    def send(self, frames: Frames) -> None:
        """Send a packet; the loop sends later the bytes that the socket does not accept at once. Thread-safe."""
        with self._lock:
            if self._closed:
                return
            parts = _parts(frames)
            if self._backlog or self._socket is None:
                self._backlog.extend(parts)
                return
            rest = _write(self._socket, parts)
            if not rest:
                return
            self._backlog.extend(rest)
        self._owner.post(self._want_write)

    @property
    def idle(self) -> bool:
        return not self._backlog

    def trust(self) -> None:
        self._limit_bytes = PACKET_LIMIT_BYTES
        self._reader.widen()
        self._owner.trusted(self)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._backlog.clear()
            sock = self._socket
        self._owner.forget(self)
        if sock is not None:
            self._owner.loop.remove_reader(sock.fileno())
            if self._writing:
                self._owner.loop.remove_writer(sock.fileno())
            with self._reading:
                sock.close()

    def forked(self) -> None:
        """In a forked child, close its copy of the socket."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()

    def drain_blocking(self, deadline: float) -> None:
        """Send the queue before the end, for as long as the peer reads and until the deadline."""
        with self._lock:
            while self._backlog and self._socket is not None and (left := deadline - time.monotonic()) > 0:
                if not await_writable(self._socket.fileno(), left):
                    return
                parts = list(self._backlog)
                self._backlog.clear()
                self._backlog.extend(_write(self._socket, parts))

    def _want_write(self) -> None:
        if not self._closed and not self._writing and self._socket is not None:
            self._writing = True
            self._owner.loop.add_writer(self._socket.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with self._lock:
            if self._closed or self._socket is None:
                return
            parts = list(self._backlog)
            self._backlog.clear()
            self._backlog.extend(_write(self._socket, parts))
            if not self._backlog:
                self._writing = False
                self._owner.loop.remove_writer(self._socket.fileno())

    def read_here(self, pick: Callable[[Frames], T | None]) -> T | None:
        """Read in place of the loop, on a thread that waits for an answer.

        Returns the result of ``pick`` for the packet that has arrived. None if no packet has arrived, or if ``pick``
        returns None: then the loop handles the packet. ``pick`` gets packets of authenticated peers only.
        """
        if not self._reading.acquire(blocking=False):
            return None
        try:
            sock, reader = self._socket, self._reader
            if sock is None or self._closed or self._unhandled is not None or reader.has_rest:
                return None
            if self._limit_bytes == UNAUTHENTICATED_LIMIT_BYTES:
                return None
            try:
                count = sock.recv_into(reader.space())
            except OSError:
                return None  # There are no bytes, or the connection is broken, as the loop will find too.
            if count == 0:
                return None
            reader.on_read(count)
            try:
                packet = reader.next_packet(self._limit_bytes)
            except ValueError:
                packet = None  # The loop finds the same error in the bytes.
            picked = pick(packet) if packet is not None else None
            if picked is None:
                self._unhandled = packet
            if picked is None or reader.has_rest:
                self._left_bytes = True
                self._owner.post(self._on_readable)
            return picked
        finally:
            self._reading.release()

    def _on_readable(self) -> None:
        with self._reading:
            if self._closed:
                return
            try:
                if not self._left_bytes or self._handle_read():
                    self._read()
            except ValueError as error:
                self.close()
                self._owner.receiver.on_rejected(self, str(error))

    def _handle_read(self) -> bool:
        """Handle packets that have been read; False once the link is closed.

        Raises:
            ValueError: the bytes are no packet.
        """
        receiver, reader = self._owner.receiver, self._reader
        self._left_bytes = False
        packet, self._unhandled = self._unhandled or reader.next_packet(self._limit_bytes), None
        while packet is not None:
            receiver.on_packet(self, packet)
            if self._closed:
                return False
            packet = reader.next_packet(self._limit_bytes) if reader.start < reader.end else None
        return True

    def _read(self) -> None:
        reader, sock = self._reader, self._socket
        for _ in range(_READS_PER_TURN):
            if sock is None:
                return
            space = reader.space()
            try:
                count = sock.recv_into(space)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lost(f"the connection broke: {error}")
                return
            if count == 0:
                self._lost("the connection was closed by the peer")
                return
            reader.on_read(count)
            if not self._handle_read() or count < len(space):
                return  # The socket is empty; the loop calls again once it is readable.

    def _lost(self, reason: str) -> None:
        self.close()
        self._owner.receiver.on_lost(self, reason)


def _parts(frames: Frames) -> list[memoryview]:
    """The packet's bytes, with small frames joined and large frames unchanged."""
    if _ONLY_BYTES.issuperset(map(type, frames)):
        sizes = list(map(len, frames))
    else:
        sizes = [memoryview(frame).nbytes for frame in frames]
    head = _HEAD.pack(_MAGIC, len(frames)) + struct.pack(f"<{len(frames)}Q", *sizes)
    if sum(sizes) <= _JOIN_BYTES:
        return [memoryview(b"".join((head, *frames)))]
    parts: list[memoryview] = []
    small: list[Any] = [head]
    for frame, size in zip(frames, sizes, strict=True):
        if size < _JOIN_BYTES:
            small.append(frame)
            continue
        parts.append(memoryview(b"".join(small)))
        parts.append(memoryview(frame).cast("B"))
        small = []
    if small:
        parts.append(memoryview(b"".join(small)))
    return parts


def _write(sock: socket.socket, parts: list[memoryview]) -> list[memoryview]:
    """Send until the socket is full or the turn's bytes are used up, and return the rest.

    Returns no rest for a broken connection, which the reader reports.
    """
    position, left = 0, _WRITE_TURN_BYTES
    while position < len(parts) and left > 0:
        try:
            if len(parts) - position == 1:
                sent = sock.send(parts[position], socket.MSG_NOSIGNAL)
            else:
                sent = sock.sendmsg(parts[position : position + _MAX_IOV], [], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            break
        except OSError:
            return []
        left -= sent
        while position < len(parts) and sent >= len(parts[position]):
            sent -= len(parts[position])
            position += 1
        if sent:
            parts[position] = parts[position][sent:]
    return parts[position:]
