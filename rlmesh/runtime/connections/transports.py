"""The transports of one runtime, each made at its first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlmesh.runtime.calling.call_stats import RunQueueMeter, thread_ids_named
from rlmesh.runtime.connections.network import NetworkOptions, plain
from rlmesh.runtime.transport.base import Link, PacketReceiver, Transport, TransportFactory


class Transports:
    """Binds and connects by the scheme of an address. On the runtime's loop.

    Args:
        meter: measures the threads of transports, too.

    Attributes:
        receiver: takes what arrives; set by the runtime.
    """

    receiver: PacketReceiver

    def __init__(
        self, network: NetworkOptions, loop: asyncio.AbstractEventLoop, post: Callable[..., None], key: bytes,
        meter: RunQueueMeter,
    ) -> None:  # fmt: skip
        self._network, self._loop, self._post, self._key, self._meter = network, loop, post, key, meter
        self.by_scheme: dict[str, Transport] = {}

    def bind(self, address: str) -> str:
        """Listen; gives the address that peers connect to.

        Raises:
            UsageError: the address cannot be used.
        """
        return self._transport(*self._network.factory(address)).bind(address)

    def connect(self, endpoint: str) -> Link:
        """Start to connect.

        Raises:
            UsageError: the address is of no known scheme.
        """
        return self._transport(*self._network.factory(endpoint)).connect(endpoint)

    def plain(self) -> Transport:
        """The transport of unencrypted connections, which carry sealed payloads only."""
        return self._transport("plain", plain)

    def idle(self) -> bool:
        """True if all packets have left, as far as this side knows."""
        return all(transport.idle() for transport in self.by_scheme.values())

    def close(self, linger_s: float) -> None:
        """Send what is queued for at most ``linger_s`` seconds, then close everything."""
        for transport in self.by_scheme.values():
            transport.close(linger_s)

    def forked(self) -> None:
        """In a forked child: close the copies of what is open, without a word to the peers."""
        for transport in self.by_scheme.values():
            transport.forked()

    def _transport(self, scheme: str, factory: TransportFactory) -> Transport:
        found = self.by_scheme.get(scheme)
        if found is None:
            found = self.by_scheme[scheme] = factory(self.receiver, self._loop, self._post, self._key)
            for thread_id in thread_ids_named("ZMQbg"):
                self._meter.add(thread_id)
        return found
