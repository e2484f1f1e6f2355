"""Stores results at their producer until a process that needs them fetches them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Any, NamedTuple

from rlmesh.errors import CallError
from rlmesh.runtime.batch_results import what_is_wrong
from rlmesh.runtime.process import clock
from rlmesh.wire import codec
from rlmesh.wire.envelope import Frames
from rlmesh.wire.passed import WHOLE, ItemRange, RemoteRef

logger = logging.getLogger(__name__)

KEEP_BYTES = 16 * 1024
"""Smaller results go to the caller at once: fetching them later would cost more."""
KEEP_S = 1800.0
"""The longest time that a result is stored, unless the call's timeout is longer; for callers that never release it."""
_SWEEP_S = 5.0

FETCH = "@fetch"
"""The method that answers with a stored result, whatever the target serves."""


class _Stored(NamedTuple):
    owner: object
    frames: Frames
    what: str
    until: float


class ResultStore:
    """The results that a process stores until their callers release them or are gone, or until they expire."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tokens = itertools.count(1)
        self._stored: dict[int, _Stored] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._stored)

    def nbytes(self) -> int:
        """Bytes of all stored results."""
        return sum(codec.size_bytes(stored.frames) for stored in list(self._stored.values()))

    def expect(self) -> None:
        """Start the expiry timer, since a caller asked to store a result. Runs on the loop."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def add(self, owner: object, frames: Frames, what: str, timeout_s: float) -> int:
        """Store a result for the caller behind ``owner``, and return its token. Thread-safe."""
        token = next(self._tokens)
        self._stored[token] = _Stored(owner, frames, what, clock.now() + max(KEEP_S, timeout_s))
        return token

    def release(self, owner: object, token: int) -> None:
        """Drop a result that its caller no longer needs."""
        stored = self._stored.get(token)
        if stored is not None and stored.owner is owner:
            self._stored.pop(token, None)

    def drop_owner(self, owner: object) -> None:
        """Drop the results of a caller that is gone."""
        for token, stored in list(self._stored.items()):
            if stored.owner is owner:
                self._stored.pop(token, None)

    def fetch(self, token: int, part: ItemRange, capture: codec.Capture | None) -> Frames:
        """The frames of a stored result, or of a list of some of its items.

        Raises:
            CallError: the result is not stored (any more), or does not have the length that its caller expects.
        """
        stored = self._stored.get(token)
        if stored is None:
            raise CallError("the result is no longer stored: its caller released it or is gone", executed="no")
        if part.start == WHOLE:
            return stored.frames
        return codec.encode(items_of(codec.decode(stored.frames), part, stored.what), capture)

    def value(self, ref: RemoteRef, capture: codec.Capture | None) -> Any:
        """The value of a result that this process stores itself. Raises like `fetch`."""
        frames = self.fetch(ref.token, ref.part, capture)
        # The buffers are copied, since the receiver may write to them and the stored result must not change.
        return codec.decode([frames[0], *map(bytearray, frames[1:])])

    def close(self) -> None:
        self._closed = True
        self._stored.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        self._timer = None
        now = clock.now()
        for token, stored in list(self._stored.items()):
            if stored.until < now:
                logger.warning("a result of %s was not fetched in time and is dropped", stored.what)
                self._stored.pop(token, None)
        if self._stored:
            self.expect()


def items_of(value: Any, part: ItemRange, what: str) -> list[Any]:
    """The items ``part`` of a batch result.

    Raises:
        CallError: the result does not have one entry per item.
    """
    if wrong := what_is_wrong(value, part.size):
        raise CallError(
            f"{what} returned {wrong} for {part.size} items of a batch call: a batch method returns a list, an array "
            "or a tensor with one result per item", executed="yes",
        )  # fmt: skip
    if isinstance(value, deque):
        return list(itertools.islice(value, part.start, part.stop))
    return list(value[part.start : part.stop])
