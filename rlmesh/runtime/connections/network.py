"""How a runtime talks to others: which transports there are, and what they may carry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlmesh.errors import PayloadTooLarge, UsageError
from rlmesh.runtime.transport.base import PacketReceiver, Transport, TransportFactory

MAX_PAYLOAD_VARIABLE = "RLMESH_MAX_PAYLOAD_BYTES"
PRIVATE_VARIABLE = "RLMESH_PRIVATE_NETWORK"


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """What a runtime may send, and by what.

    Attributes:
        max_payload_bytes: arguments or a result above it are refused at the sender (`PayloadTooLarge`).
        bulk_bytes: between nodes, larger payloads take a connection of their own, so that small calls are not stuck
            behind them.
        bulk_schemes: where that is so.
        share_memory: large arguments and results pass through shared memory where both sides can reach it.
        private: the operator's word that nobody else can listen on the network between the job's nodes: large
            payloads go unencrypted, which is several times faster. Whoever connects still has to show the key.
        busy_poll_s: who waits for the only call on its way, of a member that answers within so many seconds, looks for
            the answer instead of sleeping; 0 never does. Saves a third of a short call's time.
        transports: more transports by the scheme of their addresses, or others in place of the usual ones.
    """

    max_payload_bytes: int = 1 << 36
    bulk_bytes: int = 1 << 20
    bulk_schemes: frozenset[str] = frozenset({"tcp"})
    share_memory: bool = True
    private: bool = False
    busy_poll_s: float = 3e-4
    transports: Mapping[str, TransportFactory] = field(default_factory=dict)

    def check_payload(self, nbytes: int) -> None:
        """Raises:
        PayloadTooLarge: so much may not be sent at once.
        """
        if nbytes > self.max_payload_bytes:
            raise PayloadTooLarge(
                f"{nbytes:,} bytes are more than may be sent at once, {self.max_payload_bytes:,} bytes: send them in "
                f"parts, return less, or raise the cap ({MAX_PAYLOAD_VARIABLE}, NetworkOptions.max_payload_bytes)"
            )

    def factory(self, address: str) -> tuple[str, TransportFactory]:
        """Scheme and transport of an address.

        Raises:
            UsageError: there is none.
        """
        scheme, found, _ = address.partition("://")
        factory = {**_TRANSPORTS, **self.transports}.get(scheme) if found else None
        if factory is None:
            known = ", ".join(f"{name}://" for name in (*_TRANSPORTS, *self.transports))
            raise UsageError(f"{address!r} is no address: it begins with one of {known}")
        return scheme, factory


def options_of_environment() -> NetworkOptions:
    """What the environment says: ``RLMESH_MAX_PAYLOAD_BYTES``, ``RLMESH_PRIVATE_NETWORK=1``.

    Raises:
        UsageError: a variable holds what it cannot hold.
    """
    options = NetworkOptions()
    text = os.environ.get(MAX_PAYLOAD_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"{MAX_PAYLOAD_VARIABLE}={text!r} is no number of bytes")
    private = os.environ.get(PRIVATE_VARIABLE, "")
    if private not in ("", "0", "1"):
        raise UsageError(f"{PRIVATE_VARIABLE}={private!r}: 1 says that the network between the nodes is private, 0 not")
    return NetworkOptions(max_payload_bytes=int(text) if text else options.max_payload_bytes, private=private == "1")


# The transports are loaded when they are used: a process on one node never needs ZeroMQ.


def unix(receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes) -> Transport:
    """Unix sockets."""
    from rlmesh.runtime.transport.unix_transport import UnixTransport

    return UnixTransport(receiver, loop, post)


def plain(
    receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
) -> Transport:
    """TCP without encryption: for large payloads on a private network only."""
    from rlmesh.runtime.transport.plain_transport import PlainTransport

    return PlainTransport(receiver, loop, post)


def zeromq(
    receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
) -> Transport:
    """ZeroMQ with CURVE, over TCP or Unix sockets."""
    from rlmesh.runtime.connections.security import CurveKeys
    from rlmesh.runtime.transport.zmq_transport import ZmqTransport

    return ZmqTransport(receiver, loop, CurveKeys(key))


_TRANSPORTS: dict[str, TransportFactory] = {"unix": unix, "ipc": zeromq, "tcp": zeromq}
