"""Time use of the steps: per caller, the time spent waiting for other roles, and rlmesh's own part of it.

Every report has the cost of its sender's remote calls since the report before (``CallStats``). If a role times its
steps, only its reports with the metric ``step_time_s`` count, so that calls outside of steps are not attributed to
steps. Per called role, all in seconds and averaged over the caller's steps:

* waited: from the call to its result. Concurrent calls each count in full, so the column
  can add up to more than a step; ``share`` divides such time evenly and never does.
* method: time of the slowest member in the method; queued: in methods before it.
* run queue: threads of either side were runnable, but no core was free.
* rlmesh: the rest: serialization, transport, hand-offs between threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlmesh.job.status import CallStats, MetricRecord

__all__ = ["STEP_TIME", "CallerUse", "RoleUse", "TimeUse", "calls_to_roles", "format_time_use"]

STEP_TIME = "step_time_s"
"""The metric by which a role reports the time of its step."""


_SUMMED = ("calls", "wall_s", "method_s", "queued_s", "run_queue_s", "overhead_s", "share_s")
"""Fields of `CallStats` that are added up."""


@dataclass(frozen=True, slots=True)
class RoleUse:
    """Time of one caller in calls to ``role``, in seconds per step.

    ``slowest_method`` and ``slowest_rank`` are the ones that the caller waited for longest; ``share_s`` is
    ``waited_s`` without the overlap of concurrent calls.
    """

    role: str
    calls: float
    waited_s: float
    share_s: float
    method_s: float
    queued_s: float
    run_queue_s: float
    overhead_s: float
    slowest_method: str
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class CallerUse:
    """The waiting time of ``caller``, averaged over ``steps`` steps of ``step_s`` seconds; longest wait first."""

    caller: str
    steps: int
    step_s: float
    roles: tuple[RoleUse, ...]

    @property
    def overhead_s(self) -> float:
        """rlmesh's own seconds per step."""
        return sum(role.overhead_s for role in self.roles)

    @property
    def overhead_fraction(self) -> float:
        """rlmesh's own fraction of the step, 0 to 1."""
        return self.overhead_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def own_s(self) -> float:
        """Seconds per step in which the caller did not wait."""
        return max(0.0, self.step_s - sum(role.share_s for role in self.roles))


@dataclass(slots=True)
class _Reports:
    """Reports of one role: either those with a step time, or the others."""

    steps: set[tuple[int, int]] = field(default_factory=set)
    step_s: float = 0.0
    first_at: dict[int, float] = field(default_factory=dict)
    last_at: dict[int, float] = field(default_factory=dict)
    calls: list[CallStats] = field(default_factory=list)

    def add(self, record: MetricRecord) -> None:
        self.steps.add((record.rank, record.step))
        self.step_s += record.metrics.get(STEP_TIME, 0.0)
        self.first_at.setdefault(record.rank, record.at)
        self.last_at[record.rank] = record.at
        self.calls = _merged([*self.calls, *calls_to_roles(record)])

    def remove(self, record: MetricRecord) -> None:
        """Remove a report whose step was repeated."""
        self.step_s -= record.metrics.get(STEP_TIME, 0.0)
        self.calls = [call for call in _merged([*self.calls, *map(_negated, calls_to_roles(record))]) if call.calls > 0]


class TimeUse:
    """Adds up the call statistics of reports."""

    def __init__(self, records: Iterable[MetricRecord] = ()) -> None:
        self._timed: dict[str, _Reports] = {}
        self._others: dict[str, _Reports] = {}
        for record in records:
            self.add(record)

    def add(self, record: MetricRecord) -> None:
        kind = self._timed if STEP_TIME in record.metrics else self._others
        kind.setdefault(record.role, _Reports()).add(record)

    def remove(self, record: MetricRecord) -> None:
        """Remove a report whose step was repeated and is reported again."""
        kind = self._timed if STEP_TIME in record.metrics else self._others
        if record.role in kind:
            kind[record.role].remove(record)

    def callers(self) -> tuple[CallerUse, ...]:
        """Roles that called others, the one with the most waiting first."""
        reports = self._others | self._timed
        uses = [_use(name, own, name in self._timed) for name, own in reports.items() if own.calls]
        return tuple(sorted(uses, key=lambda use: (-sum(r.waited_s for r in use.roles), use.caller)))


def format_time_use(uses: Sequence[CallerUse]) -> list[str]:
    """Format the table that is printed when a job ends."""
    lines: list[str] = []
    for use in uses:
        lines += _format_caller(use)
    return lines


def calls_to_roles(record: MetricRecord) -> list[CallStats]:
    """The report's calls, except calls to rlmesh's own processes, whose names begin with ``@``."""
    return [call for call in record.calls if not call.role.startswith("@")]


def _use(name: str, reports: _Reports, timed: bool) -> CallerUse:
    steps = len(reports.steps)
    if timed:
        step_s = reports.step_s / steps
    else:
        # Each report ends a step: the time from a member's first to its last report has one step fewer than reports.
        elapsed = sum(reports.last_at[rank] - at for rank, at in reports.first_at.items())
        step_s = elapsed / max(1, steps - len(reports.first_at))
    by_role: dict[str, list[CallStats]] = {}
    for call in reports.calls:
        by_role.setdefault(call.role, []).append(call)
    roles = [_role_use(role, calls, steps) for role, calls in by_role.items()]
    return CallerUse(name, steps, step_s, tuple(sorted(roles, key=lambda r: (-r.waited_s, r.role))))


def _role_use(role: str, calls: list[CallStats], steps: int) -> RoleUse:
    slowest = max(calls, key=lambda call: call.wall_s)
    waited_s = sum(call.wall_s for call in calls)
    return RoleUse(
        role=role,
        calls=sum(call.calls for call in calls) / steps,
        waited_s=waited_s / steps,
        share_s=(sum(call.share_s for call in calls) or waited_s) / steps,
        method_s=sum(call.method_s for call in calls) / steps,
        queued_s=sum(call.queued_s for call in calls) / steps,
        run_queue_s=sum(call.run_queue_s for call in calls) / steps,
        overhead_s=sum(call.overhead_s for call in calls) / steps,
        slowest_method=slowest.method,
        slowest_rank=slowest.slowest_rank,
    )


def _merged(calls: Iterable[CallStats]) -> list[CallStats]:
    """One entry per role, method and slowest rank, so that the sum over a long run stays small."""
    sums: dict[tuple[str, str, int], CallStats] = {}
    for call in calls:
        key = (call.role, call.method, call.slowest_rank)
        known = sums.get(key)
        if known is not None:
            call = replace(call, **{name: getattr(known, name) + getattr(call, name) for name in _SUMMED})
        sums[key] = call
    return list(sums.values())


def _negated(call: CallStats) -> CallStats:
    return replace(call, **{name: -getattr(call, name) for name in _SUMMED})


_HEAD = (
    "waiting for", "calls", "waited s", "method s", "queued s", "run queue s", "rlmesh ms", "rlmesh %",
    "mostly for",
)  # fmt: skip


def _format_caller(use: CallerUse) -> list[str]:
    rows = [_HEAD, *(_row(use, role) for role in use.roles)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    texts = {0, len(_HEAD) - 1}
    table = [
        "  ".join(
            cell.ljust(width) if column in texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    percent = 100 * use.overhead_fraction
    return [
        f"time per step of {use.caller}: {use.step_s:.3f} s over {use.steps} steps, "
        f"of which rlmesh itself {1000 * use.overhead_s:.1f} ms ({percent:.1f} %)",
        *(f"  {line}" for line in table),
    ]


def _row(use: CallerUse, role: RoleUse) -> tuple[str, ...]:
    percent = 100 * role.overhead_s / use.step_s if use.step_s > 0 else 0.0
    return (
        role.role,
        f"{role.calls:.1f}",
        f"{role.waited_s:.4f}",
        f"{role.method_s:.4f}",
        f"{role.queued_s:.4f}",
        f"{role.run_queue_s:.4f}",
        f"{1000 * role.overhead_s:.2f}",
        f"{percent:.2f}",
        f"{role.slowest_method} on rank {role.slowest_rank}",
    )
