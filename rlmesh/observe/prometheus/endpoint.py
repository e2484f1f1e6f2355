"""The HTTP endpoint for Prometheus: only ``GET /metrics``, on loopback or on a Unix socket.

It is not a general server: one short request per connection, then the connection is closed. Other users of the machine
can read it, as they can any exporter; it shows names and numbers, and takes no input.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.observe.prometheus.listening import ListenSocket, why_taken

__all__ = ["CONTENT_TYPE", "ScrapeServer", "check_free", "parse_address"]

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
