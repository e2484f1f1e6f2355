"""The contract between the runtime and whatever moves packets. Three verbs: bind, connect, send."""

from __future__ import annotations

from typing import Protocol

from rlmesh.wire.envelope import Frames


class Link(Protocol):
    """One direction-less connection to one peer. Used on the runtime's loop only."""

    @property
    def peer(self) -> str:
        """The peer's address, for messages."""
        ...

    def send(self, frames: Frames) -> None:
        """Queue one packet; never blocks. Packets of one link arrive in order and whole, or not at all."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """What a transport calls, on the runtime's loop."""

    def on_packet(self, link: Link, frames: Frames) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None:
        """The peer is gone, or the connection is. Called at most once per link, never for a link closed here."""
        ...


class Transport(Protocol):
    def bind(self, address: str) -> str:
        """Listen; gives the address that peers connect to (with the port that the system chose)."""
        ...

    def connect(self, endpoint: str) -> Link:
        """Start to connect; packets sent before it is established are kept."""
        ...

    def close(self, linger_s: float) -> None:
        """Send what is queued for at most ``linger_s`` seconds, then close everything."""
        ...
