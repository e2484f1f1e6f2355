"""Results that stay at their producer until whoever needs them fetches them."""

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
"""Smaller results go to the caller at once: fetching them would cost more than carrying them."""
KEEP_S = 1800.0
"""At most so long, unless the call itself had longer: a bound for callers that are neither gone nor done."""
_SWEEP_S = 5.0

FETCH = "@fetch"
"""The method that answers with a kept result, whatever the target serves."""


class _Kept(NamedTuple):
    owner: object
    frames: Frames
    what: str
    until: float


class ResultStore:
    """The results that one process keeps for its callers: until they release them, are gone, or time is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tokens = itertools.count(1)
        self._kept: dict[int, _Kept] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        return sum(codec.size_bytes(kept.frames) for kept in list(self._kept.values()))

    def expect(self) -> None:
        """On the loop: a caller asked to keep a result."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def add(self, owner: object, frames: Frames, what: str, timeout_s: float) -> int:
        """Keep a result for the caller behind ``owner``; gives its token. From any thread."""
        token = next(self._tokens)
        self._kept[token] = _Kept(owner, frames, what, clock.now() + max(KEEP_S, timeout_s))
        return token

    def release(self, owner: object, token: int) -> None:
        """Its caller needs it no longer."""
        kept = self._kept.get(token)
        if kept is not None and kept.owner is owner:
            self._kept.pop(token, None)

    def drop_owner(self, owner: object) -> None:
        """A caller is gone."""
        for token, kept in list(self._kept.items()):
            if kept.owner is owner:
                self._kept.pop(token, None)

    def fetch(self, token: int, part: ItemRange, capture: codec.Capture | None) -> Frames:
        """The frames of a kept result, or of some of its items, which become a list.

        Raises:
            CallError: it is not kept (any more), or has another length than its caller counts on.
        """
        kept = self._kept.get(token)
        if kept is None:
            raise CallError("the result is no longer kept: its caller released it or is gone", executed="no")
        if part.start == WHOLE:
            return kept.frames
        return codec.encode(items_of(codec.decode(kept.frames), part, kept.what), capture)

    def value_of(self, ref: RemoteRef, capture: codec.Capture | None) -> Any:
        """A copy of a result that this process stores itself; the receiver may write to it.

        Raises:
            CallError: as `fetch`.
        """
        frames = self.fetch(ref.token, ref.part, capture)
        return codec.decode([frames[0], *map(bytearray, frames[1:])])

    def close(self) -> None:
        self._closed = True
        self._kept.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        self._timer = None
        now = clock.now()
        for token, kept in list(self._kept.items()):
            if kept.until < now:
                logger.warning("a result of %s was not fetched in time and is dropped", kept.what)
                self._kept.pop(token, None)
        if self._kept:
            self.expect()


def items_of(value: Any, part: ItemRange, what: str) -> list[Any]:
    """Items of a batch result.

    Raises:
        CallError: it has not one result per item.
    """
    if wrong := what_is_wrong(value, part.size):
        raise CallError(
            f"{what} returned {wrong} for {part.size} items of a batch call: a batch method returns a list, an array "
            "or a tensor with one result per item", executed="yes",
        )  # fmt: skip
    if isinstance(value, deque):
        return list(itertools.islice(value, part.start, part.stop))
    return list(value[part.start : part.stop])
