"""The state of a job for the views: snapshots in, numbers to show out. No I/O; the views only draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from rlmesh.job.status import JobStatus, MemberStatus, MetricRecord
from rlmesh.observe.files.repeated_steps import Replays
from rlmesh.observe.time_use import TimeUse

__all__ = ["Change", "Curve", "JobProgress", "sparkline", "state_counts"]

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a role's members: all states of the role after it, for example ``2 ready``."""

    role: str
    states: str


@dataclass(slots=True)
class Curve:
    """A metric over the steps: the mean over the members that reported it."""

    name: str
    sums: dict[int, tuple[float, int]] = field(default_factory=dict)

    def add(self, step: int, value: float) -> None:
        total, count = self.sums.get(step, (0.0, 0))
        self.sums[step] = (total + float(value), count + 1)

    def remove(self, step: int, value: float) -> None:
        """Remove a value that was added."""
        total, count = self.sums.get(step, (0.0, 0))
        if count > 1:
            self.sums[step] = (total - value, count - 1)
        else:
            self.sums.pop(step, None)

    def points(self) -> list[tuple[int, float]]:
        return [(step, total / count) for step, (total, count) in sorted(self.sums.items())]


class JobProgress:
    """Adds up snapshots of one job. Reports are counted once, by their number; if a member repeated a step after a
    restart, its newest reports count."""

    def __init__(self) -> None:
        self.status: JobStatus | None = None
        self.time_use = TimeUse()
        self.curves: dict[str, Curve] = {}
        self.latest: MetricRecord | None = None
        self._states: dict[str, str] = {}
        self._records = 0
        self._replays = Replays()

    def update(self, status: JobStatus) -> list[Change]:
        """Add a snapshot; return the changes since the one before, in the order of the members."""
        self.status = status
        for record in status.records[max(0, self._records - status.records_from) :]:
            self._add(record)
        self._records = max(self._records, status.records_from + len(status.records))
        changes = []
        for role, members in by_role(status.members).items():
            states = state_counts(members)
            if self._states.get(role) != states:
                self._states[role] = states
                changes.append(Change(role, states))
        return changes

    @property
    def step(self) -> int | None:
        """The step of the latest report; once a role has reported ``step_time_s``, only such reports count."""
        return None if self.latest is None else self.latest.step

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the job, if reported by the metric ``total_steps``."""
        values = self.values("total_steps")
        return int(values[-1]) if values else None

    def values(self, name: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        curve = self.curves.get(name)
        return [] if curve is None else [value for _, value in curve.points() if math.isfinite(value)]

    def _add(self, record: MetricRecord) -> None:
        counts, replaced = self._replays.take(record)
        for old in replaced:
            self.time_use.remove(old)
            for name, value in old.metrics.items():
                self.curves[name].remove(old.step, value)
                if not self.curves[name].sums:
                    del self.curves[name]
        if not counts:
            return
        self.time_use.add(record)
        for name, value in record.metrics.items():
            self.curves.setdefault(name, Curve(name)).add(record.step, value)
        # The role that times its steps leads the job; other roles may report at their own pace.
        if self.latest is None or "step_time_s" in record.metrics or "step_time_s" not in self.latest.metrics:
            self.latest = record


def by_role(members: Iterable[MemberStatus]) -> dict[str, list[MemberStatus]]:
    """Members by role, roles in the order of their first member."""
    roles: dict[str, list[MemberStatus]] = {}
    for member in members:
        roles.setdefault(member.role, []).append(member)
    return roles


def state_counts(members: Iterable[MemberStatus]) -> str:
    """Format states, for example ``1 ready, 1 starting``. A bound endpoint still counts as starting."""
    counts = Counter("starting" if member.state == "bound" else member.state for member in members)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def sparkline(values: Iterable[float], width: int) -> str:
    """Draw the finite values as bars of eight heights; more than ``width`` values become means of neighbours."""
    points = [value for value in values if math.isfinite(value)]
    if not points or width < 1:
        return ""
    if len(points) > width:
        edges = [round(i * len(points) / width) for i in range(width + 1)]
        points = [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(points), max(points)
    span = high / 2 - low / 2  # halves, since the full difference may overflow a float
    heights = ((value / 2 - low / 2) / span if span > 0 else 0.0 for value in points)
    return "".join(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in heights)
