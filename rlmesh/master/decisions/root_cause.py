"""Root cause analysis: which of several failures was the first cause. No I/O.

When a process dies, others notice: their calls to it raise, their process group breaks. Such errors may reach
the master before the agent has reported the death itself. So a failure that may be a consequence waits a
moment (``Limits.settle_s``) for a better explanation. Each failure has a weight from 1 to 3: the smaller, the more
likely it is the first cause and no consequence:

1. a process that was killed or exited silently: nothing inside the job explains it;
2. an exception of a member's own code, a failed start, a missed deadline;
3. an exception that came out of a call to another member.

A failure **explains** another one with a larger number in this list if the two are connected: the other member called
the failed one, directly or through others, or shares a process group or a device with it. Failures without an
explanation are ordered by time, and the oldest of them is the first cause. A completed restart of a member without
connection to the failure explains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from rlmesh.job.status import ExitInfo, FailureInfo, RestartRecord
from rlmesh.master.monitoring.graph import CallGraph

CAUSE_MEMORY_S = 60.0
"""Maximum time between the loss of a member and an exception that names it as lost."""
MENDED_S = 2.0
"""Time after the end of a restart during which errors may still be consequences of it."""


class Weight(IntEnum):
    DEATH = 1
    OWN = 2
    FOLLOWS = 3


@dataclass(frozen=True, slots=True)
class RankedFailure:
    """One failure, with its weight: the smaller, the more likely it is the first cause.

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
        """Return the same failure with the exit of its process."""
        return replace(self, info=replace(self.info, exit=exit))

    def of(self, role: str, rank: int) -> bool:
        return self.info.role == role and self.info.rank == rank


@dataclass(slots=True)
class Failures:
    """The failures of one job that are not handled yet.

    Attributes:
        found: the failures, in the order of their reports.
        settle_at: when to stop waiting for a better explanation; None without failures.
    """

    found: list[RankedFailure] = field(default_factory=list)
    settle_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(self, failure: RankedFailure, settle_at: float) -> None:
        self.found.append(failure)
        if self.settle_at is None:
            self.settle_at = settle_at

    def note_exit(self, role: str, rank: int, exit: ExitInfo) -> None:
        """Add the process exit to the failures of a member."""
        self.found = [f.with_exit(exit) if f.of(role, rank) else f for f in self.found]

    def drop(self, members: Collection[tuple[str, int]]) -> None:
        """Drop the failures of members that are restarted."""
        self.found = [f for f in self.found if (f.info.role, f.info.rank) not in members]
        if not self.found:
            self.settle_at = None

    def settled(self, now: float, graph: CallGraph) -> bool:
        """True if no better explanation is expected."""
        late = self.settle_at is not None and now >= self.settle_at
        return bool(self.found) and (late or is_settled(self.found, graph))


def first_causes(
    failures: Iterable[RankedFailure], graph: CallGraph, restarts: Sequence[RestartRecord] = ()
) -> list[FailureInfo]:
    """Return the failures: the first cause, then its consequences, oldest first.

    If the first cause came out of a call, the failures that led to the callee's restart precede it.
    """
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
    """True if one failure is the reason for another, by weight and by the graph of calls."""
    if cause.weight >= failure.weight or cause.info.role is None or failure.info.role is None:
        return cause.weight < failure.weight and cause.info.role is None
    reached = _reached(failure, graph)
    unknown = failure.weight is Weight.FOLLOWS and not reached  # the callee is not in the graph
    return unknown or cause.name in reached or cause.name in graph.beside(failure.name)


def led_to(failure: RankedFailure, restarts: Sequence[RestartRecord], graph: CallGraph) -> list[FailureInfo]:
    """Return the failures of restarted members that caused an exception out of a call, oldest first.

    A restart counts in two cases. It was in progress, or just completed, when the exception was raised, and included a
    member that the failed member called (any member, if its calls are unknown). Or the exception says that a member was
    lost, and the restart is the last one of that member before the exception.
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
    """True if a restart is the last one, before the failure, of a member that the failure names."""
    after = [other for other in later if other.at <= failure.info.at]
    return any(in_unit(record, name) and not any(in_unit(o, name) for o in after) for name in failure.blames)


def in_unit(record: RestartRecord, name: str) -> bool:
    """True if a restart included a member."""
    roles, _, rank = record.unit.partition(":")
    if record.scope == "job":
        return True
    role, _, own = name.rpartition(":")
    return role in roles.split("+") and rank in ("", own)


def _reached(failure: RankedFailure, graph: CallGraph) -> frozenset[str]:
    """Return the members that a failed member waited for, directly or through others: by its exception, else by its
    calls."""
    if failure.blames:
        return graph.reached_from(failure.blames) | set(failure.blames)
    return graph.reached_from([failure.name])


def is_settled(failures: Iterable[RankedFailure], graph: CallGraph) -> bool:
    """True if waiting for a better explanation is pointless: the known deaths explain all failures that may be
    consequences."""
    found = list(failures)
    deaths = [failure for failure in found if failure.weight is Weight.DEATH]
    follows = [failure for failure in found if failure.weight is Weight.FOLLOWS]
    return bool(deaths) and all(any(explains(death, other, graph) for death in deaths) for other in follows)


def death_message(exit: ExitInfo, doing: str) -> str:
    """Return for example ``ACTOR:1 (pid 71 on box) was killed by SIGKILL during run()``."""
    how = exit.describe()
    verb = "was " if how.startswith("killed") else ""
    place = f"pid {exit.pid}" + (f" on {exit.hostname}" if exit.hostname else "")
    ok = " before the job had ended" if exit.ok else ""
    noted = f": {exit.noted}" if exit.noted else ""
    return f"{exit.role}:{exit.rank} ({place}) {verb}{how}{ok} {doing}".rstrip() + noted
