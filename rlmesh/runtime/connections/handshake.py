"""Authenticates the peers of a runtime, and keeps count of strangers.

Until a peer is admitted, nothing of what it sends is read but the fixed layout of a handshake. A stranger gets no
answer that reveals anything, is counted by what was wrong, and is named in the log once per peer and minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from rlmesh.errors import AuthenticationFailed, VersionMismatch, WireError
from rlmesh.runtime.connections.channel import Channel
from rlmesh.runtime.transport.base import Rejection
from rlmesh.wire.envelope import Frames
from rlmesh.wire.handshake import CallerHandshake, ListenerHandshake, parse

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
QUIET_S = 2.0
_KNOWN_PEERS = 256
"""More peers than these share one line per minute."""


class Strangers:
    """Counts rejected connections; logs one line per peer and minute, and the sum once no more come.

    Attributes:
        counts: rejected connections by reason.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._name, self._clock = name, clock
        self._logged: dict[str, tuple[float, int]] = {}
        """By peer: when its last line was logged, and how many rejections were counted since without a line."""
        self._noted_at = self._summed_at = -LOG_EVERY_S
        self._summed = 0
        """The total that the last line in the log shows."""

    @property
    def total(self) -> int:
        return self.counts.total()

    def note(self, peer: str, reason: Rejection, detail: str) -> None:
        self.counts[reason] += 1
        now = self._noted_at = self._clock()
        if peer not in self._logged and len(self._logged) >= _KNOWN_PEERS:
            self._logged = {known: entry for known, entry in self._logged.items() if now - entry[0] < LOG_EVERY_S}
            if len(self._logged) >= _KNOWN_PEERS:
                peer = "others"
        logged_at, unlogged = self._logged.get(peer, (-LOG_EVERY_S, 0))
        if now - logged_at < LOG_EVERY_S:
            self._logged[peer] = (logged_at, unlogged + 1)
            return
        self._logged[peer] = (now, 0)
        self._summed = self.total
        more = f", and {unlogged} times in the last minutes" if unlogged else ""
        logger.warning(
            "%s rejected %s (%s%s): %s. Rejected so far: %s", self._name, peer, reason, more, detail, self._sums()
        )

    def settle(self, *, at_the_end: bool = False) -> None:
        """Log the sums if the last line shows fewer, no stranger came for a while, and the last sums are a minute old.

        Args:
            at_the_end: log the sums now if the last line shows fewer.
        """
        now = self._clock()
        quiet = now - self._noted_at >= QUIET_S and now - self._summed_at >= LOG_EVERY_S
        if self._summed < self.total and (quiet or at_the_end):
            self._summed, self._summed_at = self.total, now
            logger.warning("%s rejected %d strangers in all: %s", self._name, self.total, self._sums())

    def _sums(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())


class Authenticator:
    """Makes the handshakes of one runtime.

    Attributes:
        endpoint: the address that the runtime listens at.
    """

    def __init__(self, name: str, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = ""
        self.strangers = Strangers(name, clock)
        self._name, self._key = name, key

    def begin(self, channel: Channel, endpoint: str, name: str | None = None) -> None:
        """Begin the handshake with the listener at ``endpoint``, under this runtime's name or another."""
        channel.handshake = CallerHandshake(self._key, name or self._name, endpoint)
        channel.link.send(channel.handshake.hello.pack())

    def on_packet(self, channel: Channel, frames: Frames) -> bool:
        """Handle a packet of a peer that is not admitted yet; True if the peer is admitted now.

        Raises:
            WireError: the peer must not be admitted.
        """
        message = parse(frames)
        handshake = channel.handshake
        if isinstance(handshake, CallerHandshake):
            channel.link.send(handshake.answer(message).pack())
            channel.accept(message.name)
        elif isinstance(handshake, ListenerHandshake):
            channel.accept(handshake.admit(message))
        else:
            channel.handshake = ListenerHandshake(self._key, self._name, channel.link.here or self.endpoint, message)
            channel.link.send(channel.handshake.challenge.pack())
        return channel.authenticated

    def count_rejected(self, channel: Channel, error: WireError, reason: Rejection | None = None) -> None:
        """Count and log a peer that was not admitted, or a peer whose packet cannot be understood."""
        if reason is None:
            if isinstance(error, AuthenticationFailed):
                reason = "wrong key"
            elif isinstance(error, VersionMismatch):
                reason = "other version"
            else:
                reason = "malformed packet" if channel.authenticated else "no greeting"
        self.strangers.note(channel.peer_name, reason, str(error))
