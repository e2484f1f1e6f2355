"""The HTTP endpoint for Prometheus: only ``GET /metrics``, on loopback or on a Unix socket.

It is not a general server: one short request per connection, then the connection is closed. Other users of the machine
can read it, as they can any exporter; it shows names and numbers, and takes no input. At the path of a Unix socket,
which the user names, anything may exist already: no file of others is removed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmesh.errors import UsageError

PATH_BYTES = 107
LOCK_S = 1.0
_KINDS = {
    stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe",
}  # fmt: skip


def why_taken(path: Path) -> str:
    """The reason why this process must not listen at ``path``; empty if it may.

    It may if nothing exists there, or a socket of this user whose listener has ended.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        return f"the path has {len(os.fsencode(path))} bytes, and a socket's may have {PATH_BYTES}"
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        return "" if os.access(path.parent, os.W_OK | os.X_OK) else f"you may not write into {path.parent}"
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISSOCK(found.st_mode):
        return f"there is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something')} at this path already, which stays"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
        if code == 0:
            pid = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return f"another program (pid {pid}) listens there"
    if code == errno.ENOENT:
        return ""  # it has been removed meanwhile
    if code != errno.ECONNREFUSED:
        return f"another program listens there ({os.strerror(code)})"
    return "" if found.st_uid == os.getuid() else f"there is a socket of user {found.st_uid}, which stays"


class ListenSocket:
    """A socket bound at a path, open only to this user.

    Raises:
        OSError: the path is taken; see ``why_taken``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _alone_in(path.parent):
            if why := why_taken(path):
                raise OSError(errno.EADDRINUSE, why)
            path.unlink(missing_ok=True)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o077)
            try:
                self.socket.bind(os.fspath(path))
                # Before the lock is released: until a socket listens, it looks like a dead one.
                self.socket.listen()
                self._identity = _identity(path)
            except OSError:
                self.socket.close()
                raise
            finally:
                os.umask(before)

    def remove(self) -> None:
        """Remove the socket's file, if it still is this socket's."""
        with _alone_in(self.path.parent):
            if _identity(self.path) == self._identity:
                self.path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from checking and replacing a dead socket of this folder at the same moment.

    A lock that is held for long is not waited for: anybody may hold it, and binding fails if a file exists.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # the work inside fails for the same reason, and says so
        return
    try:
        deadline = time.monotonic() + LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)


logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_BYTES = 8192
REQUEST_S = 5.0
MOST_AT_ONCE = 16

Address = tuple[str, int] | Path


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``, ``PORT``, ``[::1]:PORT`` or ``unix:PATH``.

    Raises:
        UsageError: the text has another form, or the address is not on loopback.
    """
    if text.startswith("unix:"):
        if len(text) == 5:
            raise UsageError("metrics address 'unix:': name a path, as in unix:/run/user/1000/metrics")
        return Path(text[5:])
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"metrics address {text!r}: write HOST:PORT, a port alone, or unix:PATH")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(
            f"metrics address {text!r}: only loopback addresses are served, since whoever reaches the endpoint can "
            "read it; let a collector on this machine, or an authenticated proxy, ask 127.0.0.1"
        )
    return host, int(port)


def check_free(text: str) -> None:
    """Check on the master's machine, before anything is started, that metrics can be served at an address.

    Raises:
        UsageError: the address is not valid, or is taken.
    """
    address = parse_address(text)
    if isinstance(address, Path):
        why = why_taken(address)
    else:
        host, port = address
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()  # with SO_REUSEADDR this call fails if another program listens
                why = ""
            except OSError as error:
                why = error.strerror or str(error)
    if why:
        raise UsageError(f"metrics cannot be served at {text!r}: {why}. Name another address by --metrics ADDRESS")


class ScrapeServer:
    """Serves one page on the running loop.

    Args:
        page: creates the text.
    """

    def __init__(self, page: Callable[[], Awaitable[str]]) -> None:
        self._page = page
        self._server: asyncio.Server | None = None
        self._own: ListenSocket | None = None
        self._busy = 0

    async def start(self, address: Address) -> str:
        """Listen; return the address for clients, as ``http://…`` or ``unix:…``.

        Raises:
            OSError: the address is not available; nothing that exists there is touched.
        """
        if isinstance(address, Path):
            self._own = ListenSocket(address)
            self._server = await asyncio.start_unix_server(self._answer, sock=self._own.socket, limit=REQUEST_BYTES)
            return f"unix:{address}"
        self._server = await asyncio.start_server(self._answer, *address, limit=REQUEST_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None
        own, self._own = self._own, None
        if own is not None:
            own.remove()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._busy += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await self._respond(reader) if self._busy <= MOST_AT_ONCE else _response(503, "busy\n"))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("a request for metrics was given up: %s", error)
        finally:
            self._busy -= 1
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(400, "not understood\n")
        method, target = words[0], words[1].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response(405, "only GET\n")
        if target != b"/metrics":
            return _response(404, "see /metrics\n")
        try:
            text = await self._page()
        except Exception:
            logger.exception("the metrics page could not be created")
            return _response(500, "they could not be made; the master's log says why\n")
        return _response(200, text, body=method == b"GET")


_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Error", 503: "Busy"}


def _response(status: int, text: str, *, body: bool = True) -> bytes:
    data = text.encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (data if body else b"")
