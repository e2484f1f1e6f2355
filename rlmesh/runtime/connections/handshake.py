"""Who may come in. Greets those who connect, and keeps account of strangers.

Until a peer is admitted nothing of what it sends is read but the fixed layout of a greeting. A stranger gets no
answer that tells it anything, is counted by what was wrong, and named in the log once per peer and minute.
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
from rlmesh.wire.greeting import Admission, Opening, parse

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
QUIET_S = 2.0
_KNOWN_PEERS = 256
"""More peers than these share one line per minute."""


class Strangers:
    """Counts what was rejected, and logs one line per peer and minute, and how many it were once they are gone.

    Attributes:
        counts: how often, by reason.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._name, self._clock = name, clock
        self._silent: dict[str, tuple[float, int]] = {}
        self._noted_at = self._summed_at = -LOG_EVERY_S
        self._summed = 0
        """Of the total, what the last line in the log counts."""

    @property
    def total(self) -> int:
        return self.counts.total()

    def note(self, peer: str, reason: Rejection, detail: str) -> None:
        self.counts[reason] += 1
        now = self._noted_at = self._clock()
        if peer not in self._silent and len(self._silent) >= _KNOWN_PEERS:
            self._silent = {known: entry for known, entry in self._silent.items() if now - entry[0] < LOG_EVERY_S}
            if len(self._silent) >= _KNOWN_PEERS:
                peer = "others"
        logged_at, unsaid = self._silent.get(peer, (-LOG_EVERY_S, 0))
        if now - logged_at < LOG_EVERY_S:
            self._silent[peer] = (logged_at, unsaid + 1)
            return
        self._silent[peer] = (now, 0)
        self._summed = self.total
        more = f", and {unsaid} times in the last minutes" if unsaid else ""
        logger.warning(
            "%s rejected %s (%s%s): %s. Rejected so far: %s", self._name, peer, reason, more, detail, self._sums()
        )

    def settle(self, *, at_the_end: bool = False) -> None:
        """Log the sums if the last line has fewer, nobody came for a while, and the last such line is a minute old; at
        the end in any case."""
        now = self._clock()
        quiet = now - self._noted_at >= QUIET_S and now - self._summed_at >= LOG_EVERY_S
        if self._summed < self.total and (quiet or at_the_end):
            self._summed, self._summed_at = self.total, now
            logger.warning("%s rejected %d strangers in all: %s", self._name, self.total, self._sums())

    def _sums(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())


class Door:
    """Greets for one runtime. ``endpoint`` is where it listens."""

    def __init__(self, name: str, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = ""
        self.strangers = Strangers(name, clock)
        self._name, self._key = name, key

    def knock(self, channel: Channel, endpoint: str, name: str | None = None) -> None:
        """Begin the greeting with whoever listens at ``endpoint``, under this runtime's name or another."""
        opening = Opening(self._key, name or self._name, endpoint)
        channel.greeting = opening
        channel.link.send(opening.hello.pack())

    def greet(self, channel: Channel, frames: Frames) -> bool:
        """Take a packet of a peer that is not admitted yet; True if it is now.

        Raises:
            WireError: it must not be admitted.
        """
        said = parse(frames)
        greeting = channel.greeting
        if isinstance(greeting, Opening):
            channel.link.send(greeting.answer(said).pack())
            channel.accept(said.name)
        elif isinstance(greeting, Admission):
            channel.accept(greeting.admit(said))
        else:
            channel.greeting = Admission(self._key, self._name, channel.link.here or self.endpoint, said)
            channel.link.send(channel.greeting.challenge.pack())
        return channel.authenticated

    def turn_away(self, channel: Channel, error: WireError, reason: Rejection | None = None) -> None:
        """Count and log a peer that was not admitted, or one whose packet cannot be understood."""
        if reason is not None:
            pass
        elif isinstance(error, AuthenticationFailed):
            reason = "wrong key"
        elif isinstance(error, VersionMismatch):
            reason = "other version"
        else:
            reason = "malformed packet" if channel.authenticated else "no greeting"
        self.strangers.note(channel.peer_name, reason, str(error))
