"""What a sink serves and what it holds besides, as a value: `SinkState`. Pure.

::

    idle ── begin ──▶ staging ── flip ──▶ flipped ── conclude ──▶ idle
      ▲                  │                   │
      └───── abort ──────┴───── abort ───────┘

An ``in_place`` sink has no version from ``begin`` on until ``conclude``, since its weights are overwritten meanwhile;
``abort`` leaves it with none. A ``double_buffer`` sink keeps serving its version until the flip, and gets it back when
a flip is aborted. Between flip and conclusion nobody is served: whether the version is the new or the old one is known
only when all sinks have flipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlmesh.errors import WeightSyncError
from rlmesh.weights.planning.plan import Mode

Phase = Literal["idle", "staging", "flipped"]


@dataclass(frozen=True, slots=True)
class SinkState:
    """One sink.

    Attributes:
        version: what it serves; None: nothing, it refuses.
        previous: what `rollback` would give back; None: nothing.
        push: the push under way, by its number.
        coming: the version that the push brings.
        staged: buckets that are there and verified.
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
        """Whatever was under way is forgotten: its coordinator gave it up, or is gone."""
        back = self.abort()
        kept = None if self.mode == "in_place" else back.version
        return replace(
            back,
            version=kept,
            previous=None,
            phase="staging",
            push=push,
            coming=version,
            staged=frozenset(),
            total=total,
        )

    def add(self, push: int, *buckets: int) -> SinkState:
        self._must_be("staging", push)
        return replace(self, staged=self.staged.union(buckets))

    def flip(self, push: int) -> SinkState:
        self._must_be("staging", push)
        if len(self.staged) != self.total:
            missing = sorted(set(range(self.total)) - self.staged)
            raise WeightSyncError(
                f"version {self.coming} is not complete: {len(missing)} of {self.total} buckets are missing, the first "
                f"is bucket {missing[0]}"
            )
        previous = self.version if self.mode == "double_buffer" else None
        return replace(self, version=self.coming, previous=previous, phase="flipped")

    def conclude(self, push: int) -> SinkState:
        self._must_be("flipped", push)
        return replace(self, phase="idle", push=None, coming=None, staged=frozenset())

    def abort(self) -> SinkState:
        version = self.previous if self.phase == "flipped" else self.version
        if self.phase == "idle":
            return self
        previous = None if self.phase == "flipped" else self.previous
        return replace(
            self, version=version, previous=previous, phase="idle", push=None, coming=None, staged=frozenset()
        )

    def rollback(self) -> SinkState:
        """To the version before."""
        if self.phase != "idle" or self.previous is None:
            raise WeightSyncError(
                "there is no earlier version to go back to: "
                + ("its memory was needed for the next push" if self.mode == "double_buffer" else "in_place keeps none")
            )
        return replace(self, version=self.previous, previous=None)

    def _must_be(self, phase: Phase, push: int) -> None:
        if self.phase != phase or self.push != push:
            now = f"{self.phase}, push {self.push}" if self.push is not None else self.phase
            raise WeightSyncError(f"this command is for push {push} while {phase}, but the sink is {now}")
