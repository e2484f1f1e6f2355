"""`EngineLoads`: which engine samples which groups, and which engine gets the next ones. No I/O, no threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlmesh.rl.rollout.buffer import GroupSlot

__all__ = ["EngineLoads", "RequestEnd"]

SHOWN = 8
"""The most positions that a description of an engine's work names."""


@dataclass(eq=False)
class _Load:
    """The work of one engine.

    Attributes:
        up: True if it may get groups.
        alone: True while it samples a suspect (a group that may have caused a crash), and gets no other group.
        busy: the slots that it samples.
        idle_since: time since which it waits because the buffer is full.
        busy_since: time since which it samples.
        asked_at: time of the last request to it.
        death: number of its last death; the deaths of all engines are counted together.
    """

    up: bool = True
    alone: bool = False
    busy: dict[int, GroupSlot] = field(default_factory=dict)
    idle_since: float | None = None
    busy_since: float | None = None
    asked_at: float = 0.0
    death: int = 0


class RequestEnd(NamedTuple):
    """The end of a request.

    Attributes:
        alone: True if its group was a suspect, and the only group on the engine.
        death: number of the engine's death, equal for all groups that it was sampling; 0 if the engine did not die.
    """

    alone: bool
    death: int


class EngineLoads:
    """The engines of a run.

    Args:
        round_size: the most groups of a round (`rlmesh.rl.rollout.sampler`): a round begins when the last one is over,
            and a lost part of it is requested again unchanged. 0: there are no rounds, and each group is a request of
            its own.
        in_flight: without rounds, the most groups that an engine samples at a time.
    """

    def __init__(self, *, round_size: int, in_flight: int) -> None:
        self._round_size, self._in_flight = round_size, in_flight
        self._loads: dict[int, _Load] = {}
        self._lost: list[list[GroupSlot]] = []
        """Parts of the round that must be requested again, or that no engine was free for."""
        self._numbers = itertools.count(1)
        self.waited_s = 0.0
        """Sum over the engines of the seconds for which they waited because the buffer was full."""
        self.busy_s = 0.0
        """Sum over the engines of the seconds for which they sampled."""
        self._taken_at: float | None = None

    def serve(self, ranks: Sequence[int]) -> None:
        """Note that these engines have the current weights, and no others do."""
        for rank in ranks:
            self._loads.setdefault(rank, _Load()).up = True
        for rank in set(self._loads).difference(ranks):
            self._loads[rank].up = False

    def clear(self) -> None:
        """Forget everything."""
        self._loads.clear()
        self._lost.clear()

    @property
    def busy(self) -> bool:
        """True if an engine samples."""
        return any(load.busy for load in self._loads.values())

    @property
    def any_up(self) -> bool:
        """True if an engine may be asked."""
        return any(load.up for load in self._loads.values())

    @property
    def in_round(self) -> bool:
        """True if a round is not over: a part is being sampled, or can be requested again."""
        return self.busy or (bool(self._lost) and self.any_up)

    def __len__(self) -> int:
        return len(self._loads)

    def plan(self, waiting: Sequence[GroupSlot]) -> list[tuple[int, list[GroupSlot]]]:
        """The requests to make now: pairs of an engine's rank and its slots, in order.

        Args:
            waiting: the slots that may be requested, in drawing order.
        """
        up = {rank: load for rank, load in sorted(self._loads.items()) if load.up and not load.alone}
        suspects = [slot for slot in waiting if slot.suspect]
        others = [slot for slot in waiting if not slot.suspect]
        found: list[tuple[int, list[GroupSlot]]] = []
        for slot in suspects:
            rank = next((rank for rank, load in up.items() if not load.busy), None)
            if rank is None:
                if up:  # The least busy engine gets nothing new, so that it becomes free for the suspect.
                    up.pop(min(up, key=lambda one: len(up[one].busy)))
                break
            up.pop(rank)
            found.append((rank, [slot]))
        return found + (
            self._plan_round(up, others, bool(suspects)) if self._round_size else self._plan_each(up, others)
        )

    def _plan_round(
        self, up: dict[int, _Load], waiting: list[GroupSlot], suspects: bool
    ) -> list[tuple[int, list[GroupSlot]]]:
        free = [rank for rank, load in up.items() if not load.busy]
        may = {id(slot) for slot in waiting}
        parts = [part for lost in self._lost if (part := [slot for slot in lost if id(slot) in may])]
        found = list(zip(free, parts, strict=False))
        self._lost = parts[len(found) :]
        if parts or suspects or self.busy or not free:
            return found
        # As many parts as there are engines, so that the parts are the same if some have no weights.
        waiting, engines = waiting[: self._round_size], len(self._loads)
        count = len(waiting)
        cut = [waiting[count * n // engines : count * (n + 1) // engines] for n in range(engines)]
        parts = [part for part in cut if part]
        self._lost = parts[len(free) :]
        return list(zip(free, parts, strict=False))

    def _plan_each(self, up: dict[int, _Load], waiting: list[GroupSlot]) -> list[tuple[int, list[GroupSlot]]]:
        counts = {rank: len(load.busy) for rank, load in up.items()}
        found = []
        for slot in waiting:
            rank = min(counts, key=lambda one: counts[one], default=None)
            if rank is None or counts[rank] >= self._in_flight:
                break
            counts[rank] += 1
            found.append((rank, [slot]))
        return found

    def begin(self, rank: int, slots: Sequence[GroupSlot], now: float) -> None:
        """Note that an engine samples these slots."""
        load = self._loads.setdefault(rank, _Load())
        load.busy |= {slot.position: slot for slot in slots}
        load.alone, load.asked_at = any(slot.suspect for slot in slots), now

    def end(self, rank: int, slots: Sequence[GroupSlot], *, lost: bool = False) -> RequestEnd:
        """Note that an engine no longer samples these slots.

        Args:
            lost: True if the slots must be sampled again. The engine then gets nothing before it has weights again.
        """
        load = self._loads.setdefault(rank, _Load())
        for slot in slots:
            load.busy.pop(slot.position, None)
        alone, load.alone = load.alone, False
        if lost:
            if load.up:
                load.death = next(self._numbers)
            load.up = False
            if self._round_size:
                self._lost.append(list(slots))
        return RequestEnd(alone, load.death if lost else 0)

    def measure(self, now: float, *, full: bool) -> None:
        """Add up the times that engines wait and sample.

        Args:
            now: seconds of any clock.
            full: True if no slot may be requested now.
        """
        for load in self._loads.values():
            if load.idle_since is not None:
                self.waited_s += now - load.idle_since
            load.idle_since = now if full and load.up and not load.busy else None
            if load.busy_since is not None:
                self.busy_s += now - load.busy_since
            load.busy_since = now if load.busy else None

    def take_times(self, now: float) -> tuple[float, float]:
        """The mean seconds that engines waited because the buffer was full, and the mean share of time that they
        sampled, since the last call; 0 at the first call.

        Args:
            now: seconds of the clock of `measure`, which must be called first.
        """
        engines, passed_s = max(len(self._loads), 1), 0.0 if self._taken_at is None else now - self._taken_at
        found = self.waited_s / engines, min(self.busy_s / engines / passed_s, 1.0) if passed_s > 0 else 0.0
        self.waited_s, self.busy_s, self._taken_at = 0.0, 0.0, now
        return found

    def described(self, now: float) -> str:
        """A text for people about the work of each engine."""
        return "; ".join(f"engine {rank} {_work_of(load, now)}" for rank, load in sorted(self._loads.items()))


def _work_of(load: _Load, now: float) -> str:
    if not load.up:
        return "has no weights"
    if not load.busy:
        return "samples nothing"
    positions = ", ".join(map(str, sorted(load.busy)[:SHOWN])) + (" and others" if len(load.busy) > SHOWN else "")
    groups, places = ("group", "position") if len(load.busy) == 1 else ("groups", "positions")
    asked = f"and got its last request {now - load.asked_at:.0f} s ago"
    return f"samples {len(load.busy)} {groups} ({places} {positions}) {asked}"
