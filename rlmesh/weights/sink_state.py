"""The version that a sink serves: `SinkState` says which, `VersionGate` keeps it constant while requests run.

A `SinkState` is an immutable value, with the push under way::

    idle ── begin ──▶ staging ── flip ──▶ flipped ── conclude ──▶ idle
      ▲                  │                   │
      └───── abort ──────┴───── abort ───────┘

An ``in_place`` sink has no version from ``begin`` until ``conclude``, since its weights are overwritten in between;
``abort`` leaves it without one. A ``double_buffer`` sink serves its version until the flip, and returns to it if the
flip is aborted. Between flip and conclusion no request is served: whether the new or the old version is valid is known
only when all sinks have flipped.

Requests use the gate::

    with gate.serving() as version:     # the weights do not change inside this block
        …

A request may hold the gate for one token or for all of its tokens: everything inside one block is computed by one
version. A waiting flip goes before later requests, so that it is not starved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rlmesh.errors import WeightsNotReady, WeightSyncError
from rlmesh.runtime.process import clock
from rlmesh.weights.planning.plan import Mode

Phase = Literal["idle", "staging", "flipped"]


@dataclass(frozen=True, slots=True)
class SinkState:
    """The state of one sink.

    Attributes:
        version: the version that it serves; None: it refuses requests.
        previous: the version that `rollback` returns to; None: there is none.
        push: the number of the push under way.
        coming: the version that the push brings.
        staged: numbers of the buckets that have arrived and are verified.
        total: the number of buckets of the push.
    """

    mode: Mode
    version: int | None = None
    previous: int | None = None
    phase: Phase = "idle"
    push: int | None = None
    coming: int | None = None
    staged: frozenset[int] = frozenset()
    total: int = 0

    @property
    def serves(self) -> bool:
        return self.phase != "flipped" and self.version is not None

    def begin(self, push: int, version: int, total: int) -> SinkState:
        """A new push starts; an unfinished one is aborted, since its coordinator gave up or is gone."""
        kept = None if self.mode == "in_place" else self.abort().version
        return SinkState(self.mode, kept, None, "staging", push, version, frozenset(), total)

    def add(self, push: int, *buckets: int) -> SinkState:
        """Buckets have arrived and are verified."""
        self._require("staging", push)
        staged = self.staged.union(buckets)
        return SinkState(self.mode, self.version, self.previous, "staging", push, self.coming, staged, self.total)

    def flip(self, push: int) -> SinkState:
        """The new weights are in use, but requests wait for `conclude`.

        Raises:
            WeightSyncError: buckets are missing.
        """
        self._require("staging", push)
        if len(self.staged) != self.total:
            missing = sorted(set(range(self.total)) - self.staged)
            raise WeightSyncError(
                f"version {self.coming} is not complete: {len(missing)} of {self.total} buckets are missing, the first "
                f"is bucket {missing[0]}"
            )
        previous = self.version if self.mode == "double_buffer" else None
        return SinkState(self.mode, self.coming, previous, "flipped", push, self.coming, self.staged, self.total)

    def conclude(self, push: int) -> SinkState:
        """All sinks have flipped: the new version is served."""
        self._require("flipped", push)
        return SinkState(self.mode, self.version, self.previous)

    def abort(self) -> SinkState:
        """The push has failed: return to the version before it."""
        if self.phase == "idle":
            return self
        if self.phase == "flipped":
            return SinkState(self.mode, self.previous)
        return SinkState(self.mode, self.version, self.previous)

    def rollback(self) -> SinkState:
        """Return to the version before the last committed one.

        Raises:
            WeightSyncError: there is none.
        """
        if self.phase != "idle" or self.previous is None:
            raise WeightSyncError(
                "there is no earlier version to go back to: "
                + ("its memory was needed for the next push" if self.mode == "double_buffer" else "in_place keeps none")
            )
        return SinkState(self.mode, self.previous)

    def _require(self, phase: Phase, push: int) -> None:
        if self.phase != phase or self.push != push:
            now = f"{self.phase}, push {self.push}" if self.push is not None else self.phase
            raise WeightSyncError(f"this command is for push {push} while {phase}, but the sink is {now}")


class VersionGate:
    """Thread-safe.

    Args:
        who: the member's name, for error texts.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.who = who
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version: int | None = None
        self._why_none = "no weights have come yet"
        self._closed_for: str | None = None
        self._closed_at = self._none_since = clock()
        self._inside = 0
        self._own = threading.local()

    @property
    def version(self) -> int | None:
        """The version that is served; None: no version is."""
        return self._version

    @contextmanager
    def serving(self, timeout_s: float = 60.0) -> Iterator[int]:
        """Keep the weights constant within the block; yields their version. Waits while a flip is under way.

        Raises:
            WeightsNotReady: there are no weights of a known version, or the flip took longer than ``timeout_s``.
        """
        version = self._enter(timeout_s)
        self._own.depth = self._depth() + 1
        try:
            yield version
        finally:
            self._own.depth -= 1
            with self._lock:
                self._inside -= 1
                self._changed.notify_all()

    def _depth(self) -> int:
        return int(getattr(self._own, "depth", 0))

    def _enter(self, timeout_s: float) -> int:
        with self._lock:
            # A thread that is inside may enter again: the flip waits for its outermost block anyway.
            if not self._depth():
                clock.wait_for(self._changed, lambda: self._closed_for is None, timeout_s)
                if self._closed_for is not None:
                    raise WeightsNotReady(
                        f"{self.who} cannot serve: {self._closed_for} since {self._clock() - self._closed_at:.1f} s, "
                        "and the pushing process has not concluded it. It serves again after the next push"
                    )
            if self._version is None:
                raise WeightsNotReady(
                    f"{self.who} has no weights to serve: {self._why_none} (since "
                    f"{self._clock() - self._none_since:.1f} s). Push to it first: WeightSync.push(version)"
                )
            self._inside += 1
            return self._version

    def close(self, why: str, timeout_s: float) -> None:
        """Let no request in, and wait until all running requests have left.

        Raises:
            WeightSyncError: a request stayed longer than ``timeout_s``; the gate is open again.
        """
        with self._lock:
            if self._closed_for is None:
                self._closed_for, self._closed_at = why, self._clock()
            if self._inside and not clock.wait_for(self._changed, lambda: self._inside == 0, timeout_s):
                self._closed_for = None
                self._changed.notify_all()
                raise WeightSyncError(
                    f"{self.who} still serves {self._inside} requests with version {self._version} after "
                    f"{timeout_s:g} s: let requests end sooner, hold the gate per token, or raise flip_timeout_s"
                )

    def set_version(self, version: int | None, why_none: str = "") -> None:
        """Set the version that requests get; ``why_none`` says in errors why there is none."""
        with self._lock:
            if version is None and self._version is not None:
                self._none_since = self._clock()
            self._version, self._why_none = version, why_none or self._why_none

    def open(self) -> None:
        """Let requests in again."""
        with self._lock:
            self._closed_for = None
            self._changed.notify_all()
