"""`SinkState`: the version that a sink serves, and the push under way, as an immutable value. No I/O.

::

    idle ── begin ──▶ staging ── flip ──▶ flipped ── conclude ──▶ idle
      ▲                  │                   │
      └───── abort ──────┴───── abort ───────┘

An ``in_place`` sink has no version from ``begin`` until ``conclude``, since its weights are overwritten in between;
``abort`` leaves it without one. A ``double_buffer`` sink serves its version until the flip, and returns to it if the
flip is aborted. Between flip and conclusion no request is served: whether the new or the old version is valid is known
only when all sinks have flipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlmesh.errors import WeightSyncError
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
