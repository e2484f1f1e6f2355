"""Steps that were reported twice: a restarted member goes on from its checkpoint. No I/O.

Per member and step only the reports of its newest process count, whatever metrics they
have. Processes of a member are distinguished by the sender of their reports; one that first reported later is newer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rlmesh.job.status import MetricRecord

__all__ = ["Replays", "current_reports"]

MOST_STEPS = 50_000
"""Steps of members whose reports can still be replaced; in longer jobs the oldest cannot."""

Member = tuple[str, int]


class Replays:
    """Finds replaced reports as they arrive."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._most_steps = most_steps
        self._senders: dict[Member, dict[str, int]] = {}
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
        """The position of the report's sender among its member's senders: a newer process has a higher one."""
        senders = self._senders.setdefault((record.role, record.rank), {})
        return senders.setdefault(record.sender, len(senders))


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
