"""Steps that were reported twice: a member goes on from a checkpoint. No I/O.

Per member and step only the reports of its newest pass over the steps count, whatever metrics they have. A new process
of a member begins a pass; processes are distinguished by the sender of their reports. So does a process that goes back
to an earlier step, as a trainer does when another role has lost its state: it then times (`STEP_TIME`) a step before
the last one, or the last one again with more ``steps_lost``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rlmesh.job.status import MetricRecord
from rlmesh.observe.time_use import STEP_TIME

__all__ = ["Replays", "current_reports"]

STEPS_LOST = "steps_lost"
"""The metric of the number of steps that restarts have undone."""
MOST_STEPS = 50_000
"""Steps of members whose reports can still be replaced; in longer jobs the oldest cannot."""

Member = tuple[str, int]


class Replays:
    """Finds replaced reports as they arrive."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._most_steps = most_steps
        self._passes: dict[Member, _Passes] = {}
        self._current: OrderedDict[tuple[str, int, int], tuple[int, list[MetricRecord]]] = OrderedDict()

    def take(self, record: MetricRecord) -> tuple[bool, list[MetricRecord]]:
        """Add a report; return True if it counts, and the earlier reports that it replaces."""
        age = self.age(record)
        key = (record.role, record.rank, record.step)
        known = self._current.get(key)
        if known is not None and known[0] > age:
            return False, []
        if known is not None and known[0] == age:
            known[1].append(record)
            return True, []
        self._current[key] = age, [record]
        while len(self._current) > self._most_steps:
            self._current.popitem(last=False)
        return True, [] if known is None else known[1]

    def age(self, record: MetricRecord) -> int:
        """The number of the report's pass among those of its member: a newer one has a higher number."""
        return self._passes.setdefault((record.role, record.rank), _Passes()).number(record)


class _Passes:
    """The passes of a member over the steps."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """The present pass of each sender."""
        self._last: dict[str, tuple[int, float]] = {}
        """The last step that each sender has timed, and the steps that were lost until then."""
        self._count = 0

    def number(self, record: MetricRecord) -> int:
        """The number of the pass of the next report."""
        sender = record.sender
        if sender not in self._numbers or self._goes_back(record):
            self._numbers[sender] = self._count
            self._count += 1
        if STEP_TIME in record.metrics:
            self._last[sender] = record.step, record.metrics.get(STEPS_LOST, 0.0)
        return self._numbers[sender]

    def _goes_back(self, record: MetricRecord) -> bool:
        if STEP_TIME not in record.metrics or record.sender not in self._last:
            return False
        step, lost = self._last[record.sender]
        return record.step < step or (record.step == step and record.metrics.get(STEPS_LOST, 0.0) > lost)


def current_reports(records: Iterable[MetricRecord]) -> list[MetricRecord]:
    """The reports that were not replaced, in order."""
    replays = Replays()
    ages: dict[tuple[str, int, int], int] = {}
    found = []
    for record in records:
        age, key = replays.age(record), (record.role, record.rank, record.step)
        ages[key] = max(age, ages.get(key, 0))
        found.append((age, key, record))
    return [record for age, key, record in found if age == ages[key]]
