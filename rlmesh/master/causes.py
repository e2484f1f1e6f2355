"""Which of several failures was the first cause. Pure.

When a process dies, others notice: their calls to it raise, their process group breaks. Such errors may reach
the master before the agent has reported the death itself. So a failure that may be a consequence waits a
moment (``Limits.settle_s``) for a better explanation, and the best one is put first:

1. a process that was killed, or that left without a word: nothing inside the job explains it;
2. an exception of a member's own code, a start that failed, a deadline that passed;
3. an exception that came out of a call to another member.

Within a class the oldest comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar

from rlmesh.job.status import ExitInfo, FailureInfo


class Weight(IntEnum):
    DEATH = 1
    OWN = 2
    FOLLOWS = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, with how well it explains itself."""

    weight: Weight
    info: FailureInfo

    def with_exit(self, exit: ExitInfo) -> Failure:
        """The same failure, once it is known how its process ended."""
        return replace(self, info=replace(self.info, exit=exit))

    def of(self, role: str, rank: int) -> bool:
        return self.info.role == role and self.info.rank == rank


class Failures:
    """The failures of one job that are not dealt with yet. ``settle_s``: how long one waits for a better
    explanation."""

    KEPT: ClassVar[Mapping[str, object]] = {"_found": list[Failure], "_settle_at": float | None}

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._found: list[Failure] = []
        self._settle_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Failure]:
        return iter(list(self._found))

    def add(self, weight: Weight, info: FailureInfo, now: float) -> None:
        self._found.append(Failure(weight, info))
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
        return bool(self._found) and (late or is_settled(self._found))

    def causes(self) -> list[FailureInfo]:
        """First cause first."""
        return first_causes(self._found)


def first_causes(failures: Iterable[Failure]) -> list[FailureInfo]:
    """The failures, first cause first, then what followed, oldest first."""
    ordered = sorted(failures, key=lambda failure: (failure.weight, failure.info.at))
    if not ordered:
        return []
    first, *others = ordered
    return [first.info, *(f.info for f in sorted(others, key=lambda failure: failure.info.at))]


def is_settled(failures: Iterable[Failure]) -> bool:
    """Whether waiting for a better explanation is pointless: one is a death, and known in full."""
    return any(f.weight is Weight.DEATH for f in failures)


def death_message(exit: ExitInfo, doing: str) -> str:
    """For example ``ACTOR:1 (pid 71 on box) was killed by SIGKILL during run()``."""
    how = exit.describe()
    verb = "was " if how.startswith("killed") else ""
    place = f"pid {exit.pid}" + (f" on {exit.hostname}" if exit.hostname else "")
    ok = " before the job had ended" if exit.ok else ""
    noted = f": {exit.noted}" if exit.noted else ""
    return f"{exit.role}:{exit.rank} ({place}) {verb}{how}{ok} {doing}".rstrip() + noted
