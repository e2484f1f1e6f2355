"""The network options of a runtime: its transports and their limits."""

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
    """Limits and transports of a runtime.

    Attributes:
        max_payload_bytes: larger arguments or results are refused at the sender (`PayloadTooLarge`).
        bulk_bytes: between nodes, payloads of at least this size take a second connection, so that small calls do not
            wait behind them.
        bulk_schemes: the schemes of addresses with such second connections.
        share_memory: large arguments and results pass through shared memory where both sides can reach it.
        private: True if the operator declares that nobody else can listen on the network between the job's nodes: large
            payloads then go unencrypted, which is several times faster. Connecting still requires the key.
        busy_poll_s: a caller whose only pending call goes to a member that answers within this time polls for the
            answer instead of sleeping; 0 never polls. Saves a third of a short call's time.
        transports: additional transports by address scheme; they replace built-in transports of the same scheme.
    """

    max_payload_bytes: int = 1 << 36
    bulk_bytes: int = 1 << 20
    bulk_schemes: frozenset[str] = frozenset({"tcp"})
    share_memory: bool = True
    private: bool = False
    busy_poll_s: float = 3e-4
    transports: Mapping[str, TransportFactory] = field(default_factory=dict)

    def check_payload(self, nbytes: int) -> None:
        """Check a payload's size against the limit.

        Raises:
            PayloadTooLarge: the payload is larger.
        """
        if nbytes > self.max_payload_bytes:
            raise PayloadTooLarge(
                f"{nbytes:,} bytes are more than may be sent at once, {self.max_payload_bytes:,} bytes: send them in "
                f"parts, return less, or raise the cap ({MAX_PAYLOAD_VARIABLE}, NetworkOptions.max_payload_bytes)"
            )

    def factory(self, address: str) -> tuple[str, TransportFactory]:
        """The scheme of an address and the factory of its transport.

        Raises:
            UsageError: no transport has such a scheme.
        """
        scheme, found, _ = address.partition("://")
        factory = {**_TRANSPORTS, **self.transports}.get(scheme) if found else None
        if factory is None:
            known = ", ".join(f"{name}://" for name in (*_TRANSPORTS, *self.transports))
            raise UsageError(f"{address!r} is no address: it begins with one of {known}")
        return scheme, factory


def options_of_environment() -> NetworkOptions:
    """Options from the environment: ``RLMESH_MAX_PAYLOAD_BYTES``, ``RLMESH_PRIVATE_NETWORK=1``.

    Raises:
        UsageError: a variable has an invalid value.
    """
    options = NetworkOptions()
    text = os.environ.get(MAX_PAYLOAD_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"{MAX_PAYLOAD_VARIABLE}={text!r} is no number of bytes")
    private = os.environ.get(PRIVATE_VARIABLE, "")
    if private not in ("", "0", "1"):
        raise UsageError(f"{PRIVATE_VARIABLE}={private!r}: 1 says that the network between the nodes is private, 0 not")
    return NetworkOptions(max_payload_bytes=int(text) if text else options.max_payload_bytes, private=private == "1")


# Transports are imported on first use: a process of a job on one node never needs ZeroMQ.


def unix(receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes) -> Transport:
    """Make the transport over Unix sockets."""
    from rlmesh.runtime.transport.unix_transport import UnixTransport

    return UnixTransport(receiver, loop, post)


def plain(
    receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
) -> Transport:
    """Make the transport over TCP without encryption, for large payloads on a private network only."""
    from rlmesh.runtime.transport.plain_transport import PlainTransport

    return PlainTransport(receiver, loop, post)


def zeromq(
    receiver: PacketReceiver, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes
) -> Transport:
    """Make the transport over ZeroMQ with CURVE, on TCP or Unix sockets."""
    from rlmesh.runtime.connections.security import CurveKeys
    from rlmesh.runtime.transport.zmq_transport import ZmqTransport

    return ZmqTransport(receiver, loop, CurveKeys(key))


_TRANSPORTS: dict[str, TransportFactory] = {"unix": unix, "ipc": zeromq, "tcp": zeromq}
