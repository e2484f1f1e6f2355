"""Steps that were reported twice: a member that was started again goes on from its checkpoint. Pure.

Per member and step the reports of its newest process stand, and those of older processes do not, whatever metrics they
have. Processes of a member are told apart by the sender of their reports; one that reported first later is newer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rlmesh.job.status import MetricRecord

__all__ = ["Replays", "standing"]

KEPT = 50_000
"""Steps of members whose reports can still be replaced; of longer jobs the oldest cannot."""

Member = tuple[str, int]


class Replays:
    """Looks at reports as they come."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._senders: dict[Member, dict[str, int]] = {}
        self._standing: OrderedDict[tuple[str, int, int], tuple[int, list[MetricRecord]]] = OrderedDict()

    def take(self, record: MetricRecord) -> tuple[bool, list[MetricRecord]]:
        """Whether a report stands, and which earlier ones it replaces."""
        age = self.age(record)
        key = (record.role, record.rank, record.step)
        known = self._standing.get(key)
        if known is not None and known[0] > age:
            return False, []
        if known is not None and known[0] == age:
            known[1].append(record)
            return True, []
        self._standing[key] = age, [record]
        while len(self._standing) > self._kept:
            self._standing.popitem(last=False)
        return True, [] if known is None else known[1]

    def age(self, record: MetricRecord) -> int:
        """The place of its sender among those of its member: a newer process has a higher one."""
        senders = self._senders.setdefault((record.role, record.rank), {})
        return senders.setdefault(record.sender, len(senders))


def standing(records: Iterable[MetricRecord]) -> list[MetricRecord]:
    """The reports that stand, in their order."""
    replays = Replays()
    ages: dict[tuple[str, int, int], int] = {}
    found = []
    for record in records:
        age, key = replays.age(record), (record.role, record.rank, record.step)
        ages[key] = max(age, ages.get(key, 0))
        found.append((age, key, record))
    return [record for age, key, record in found if age == ages[key]]
