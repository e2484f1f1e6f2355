"""Which of several failures was the first cause. Pure.

When a process dies, others notice: their calls to it raise, their process group breaks. Such errors may reach
the master before the agent has reported the death itself. So a failure that may be a consequence waits a
moment (``Limits.settle_s``) for a better explanation. How well a failure explains itself is its weight:

1. a process that was killed, or that left without a word: nothing inside the job explains it;
2. an exception of a member's own code, a start that failed, a deadline that passed;
3. an exception that came out of a call to another member.

A failure **explains** another one that weighs less if the two are connected: the other member called the one that
failed, directly or through others, or shares a process group or a device with it. Failures that nothing explains are
told by time, so the oldest of them is the first cause. A restart that was mended before, of a member with which the
failure has no connection, explains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Protocol

from rlmesh.job.status import ExitInfo, FailureInfo, RestartRecord
from rlmesh.master.monitoring.graph import CallGraph

CAUSE_MEMORY_S = 60.0
"""An exception that names a member which was lost may be raised this long after the loss."""
MENDED_S = 2.0
"""So long after everybody serves again, an error may still follow from a restart."""


class Weight(IntEnum):
    DEATH = 1
    OWN = 2
    FOLLOWS = 3


@dataclass(frozen=True, slots=True)
class RankedFailure:
    """One failure, with how well it explains itself.

    Attributes:
        blames: names of the members whose calls its exception came from.
        lost: the exception says that one of them was lost.
    """

    weight: Weight
    info: FailureInfo
    blames: tuple[str, ...] = ()
    lost: bool = False

    @property
    def name(self) -> str:
        return f"{self.info.role}:{self.info.rank}"

    def with_exit(self, exit: ExitInfo) -> RankedFailure:
        """The same failure, once it is known how its process ended."""
        return replace(self, info=replace(self.info, exit=exit))

    def of(self, role: str, rank: int) -> bool:
        return self.info.role == role and self.info.rank == rank


class HasGraph(Protocol):
    """A job's context, which is saved apart from what was decided."""

    graph: CallGraph


class Failures:
    """The failures of one job that are not dealt with yet.

    Args:
        settle_s: how long one waits for a better explanation.
        job: has the graph of calls, as far as they are known.
    """

    KEPT: ClassVar[Mapping[str, object]] = {"_found": list[RankedFailure], "_settle_at": float | None}

    def __init__(self, settle_s: float, job: HasGraph) -> None:
        self._settle_s, self._job = settle_s, job
        self._found: list[RankedFailure] = []
        self._settle_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[RankedFailure]:
        return iter(list(self._found))

    def add(
        self, weight: Weight, info: FailureInfo, now: float, blames: tuple[str, ...] = (), *, lost: bool = False
    ) -> None:
        self._found.append(RankedFailure(weight, info, blames, lost))
        if self._settle_at is None:
            self._settle_at = now + self._settle_s

    def note_exit(self, role: str, rank: int, exit: ExitInfo) -> None:
        """It is known how the process of a member that failed has ended."""
        self._found = [f.with_exit(exit) if f.of(role, rank) else f for f in self._found]

    def drop(self, members: Collection[tuple[str, int]]) -> None:
        """Forget what these members failed with: they are started again."""
        self._found = [f for f in self._found if (f.info.role, f.info.rank) not in members]
        if not self._found:
            self._settle_at = None

    def settled(self, now: float) -> bool:
        """Whether no better explanation is waited for."""
        late = self._settle_at is not None and now >= self._settle_at
        return bool(self._found) and (late or is_settled(self._found, self._job.graph))

    def causes(self, restarts: Sequence[RestartRecord] = ()) -> list[FailureInfo]:
        """First cause first. ``restarts``: of the job so far, one of which may be behind the failures."""
        return first_causes(self._found, self._job.graph, restarts)


def first_causes(
    failures: Iterable[RankedFailure], graph: CallGraph, restarts: Sequence[RestartRecord] = ()
) -> list[FailureInfo]:
    """The failures, first cause first, then what followed, oldest first. A first cause that came out of a call has
    the failures before it that led to the restart of whoever was called."""
    found = sorted(failures, key=lambda failure: failure.info.at)
    if not found:
        return []
    roots = [failure for failure in found if not any(explains(other, failure, graph) for other in found)]
    first = roots[0]
    infos = [first.info, *(failure.info for failure in found if failure is not first)]
    if first.weight is not Weight.FOLLOWS:
        return infos
    known = {info.message for info in infos}
    return [*(info for info in led_to(first, restarts, graph) if info.message not in known), *infos]


def explains(cause: RankedFailure, failure: RankedFailure, graph: CallGraph) -> bool:
    """Whether one failure is the reason of another one, by weight and by the graph of calls."""
    if cause.weight >= failure.weight or cause.info.role is None or failure.info.role is None:
        return cause.weight < failure.weight and cause.info.role is None
    reached = _reached(failure, graph)
    unknown = failure.weight is Weight.FOLLOWS and not reached  # it called somebody, of whom nothing is known
    return unknown or cause.name in reached or cause.name in graph.beside(failure.name)


def led_to(failure: RankedFailure, restarts: Sequence[RestartRecord], graph: CallGraph) -> list[FailureInfo]:
    """The failures of restarted members that an exception out of a call follows from, oldest first.

    Such a restart was under way, or just mended, when the exception was raised, and concerned a member that the
    failed one called (any member, if nothing is known of its calls); or it is the last loss of the very member that
    the exception names.
    """
    at, reached = failure.info.at, _reached(failure, graph)
    found = []
    for number, record in enumerate(restarts):
        if record.at > at:
            continue
        under_way = record.ready_at is None or at <= record.ready_at + MENDED_S
        touched = not reached or any(in_unit(record, name) for name in reached)
        named = failure.lost and at - record.at <= CAUSE_MEMORY_S
        if (under_way and touched) or (named and _last_of(record, restarts[number + 1 :], failure)):
            found.append(record.failure)
    return found


def _last_of(record: RestartRecord, later: Sequence[RestartRecord], failure: RankedFailure) -> bool:
    """Whether a restart is the last one, before the failure, of a member that it names."""
    after = [other for other in later if other.at <= failure.info.at]
    return any(in_unit(record, name) and not any(in_unit(o, name) for o in after) for name in failure.blames)


def in_unit(record: RestartRecord, name: str) -> bool:
    """Whether a restart took a member along."""
    roles, _, rank = record.unit.partition(":")
    if record.scope == "job":
        return True
    role, _, own = name.rpartition(":")
    return role in roles.split("+") and rank in ("", own)


def _reached(failure: RankedFailure, graph: CallGraph) -> frozenset[str]:
    """Whom a member that failed waited for, directly or through others: by its exception, else by its calls."""
    return (
        graph.reached_from(failure.blames) | set(failure.blames)
        if failure.blames
        else (graph.reached_from([failure.name]))
    )


def is_settled(failures: Iterable[RankedFailure], graph: CallGraph) -> bool:
    """Whether waiting for a better explanation is pointless: one is a death, known in full, and explains all that may
    be a consequence."""
    found = list(failures)
    deaths = [failure for failure in found if failure.weight is Weight.DEATH]
    follows = [failure for failure in found if failure.weight is Weight.FOLLOWS]
    return bool(deaths) and all(any(explains(death, other, graph) for death in deaths) for other in follows)


def death_message(exit: ExitInfo, doing: str) -> str:
    """For example ``ACTOR:1 (pid 71 on box) was killed by SIGKILL during run()``."""
    how = exit.describe()
    verb = "was " if how.startswith("killed") else ""
    place = f"pid {exit.pid}" + (f" on {exit.hostname}" if exit.hostname else "")
    ok = " before the job had ended" if exit.ok else ""
    noted = f": {exit.noted}" if exit.noted else ""
    return f"{exit.role}:{exit.rank} ({place}) {verb}{how}{ok} {doing}".rstrip() + noted
