"""Which member is the least busy, as far as one caller can know. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SAME_NS = 1_000_000
"""Queueing times that differ by less count as equal."""


class Load(NamedTuple):
    """What a caller knows of a member.

    ``queued_ns`` is how long its last answered call had waited for other calls there, whoever made them; it is
    halved each time the member is passed over, so that an old figure does not count for ever.
    """

    alive: bool
    reachable: bool
    in_flight: int
    queued_ns: int


def least_busy(loads: Sequence[Load], turn: int) -> int:
    """Index of the member to call: alive, with a known address, fewest calls of this caller on their way, then
    the shortest queue; among equals they take turns.

    Args:
        loads: at least one.
        turn: a number that grows with each call.
    """
    best = min((not load.alive, not load.reachable, load.in_flight, load.queued_ns // _SAME_NS) for load in loads)
    equal = [
        index
        for index, load in enumerate(loads)
        if (not load.alive, not load.reachable, load.in_flight, load.queued_ns // _SAME_NS) == best
    ]
    return equal[turn % len(equal)]
