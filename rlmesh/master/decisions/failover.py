"""Whether a failed member is started again, with whom and when. Pure: facts in, a decision out.

A failure has a *unit*, by the scope of its role's rule: the member, its role, or the job. The unit's restarts within
the rule's window are its budget. The first of them is immediate, later ones are held back for longer and longer. A
failure beyond the budget ends the job, and the error that is told is the first one of the window, not the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlmesh.job.restarts import Scope
from rlmesh.job.status import FailureInfo, RestartRecord
from rlmesh.master.jobspec import RestartRule

__all__ = ["Exhausted", "FailoverCoordinator", "Restart"]

JOB_UNIT = "job"
STRICTNESS: tuple[Scope, ...] = ("never", "job", "role", "member")
"""Of the scopes of roles that share a process, the first one holds."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these members again. ``number`` counts the unit's restarts within the window, this one included;
    ``budget`` is how many there may be."""

    record: RestartRecord
    members: tuple[tuple[str, int], ...]
    number: int
    budget: int


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The unit has failed too often: the job ends with this failure."""

    failure: FailureInfo


class FailoverCoordinator:
    """Decides for one job.

    Args:
        rules: of each role.
        sizes: number of members of each role.
        fusions: sets of roles that share processes, rank by rank, and so fail and come back together.
    """

    def __init__(
        self, rules: Mapping[str, RestartRule], sizes: Mapping[str, int], fusions: Sequence[Sequence[str]] = ()
    ) -> None:
        self._rules = dict(rules)
        self._sizes = dict(sizes)
        self._fused = {role: tuple(roles) for roles in fusions for role in roles}
        for roles in fusions:
            self._rules |= dict.fromkeys(roles, strictest([rules[role] for role in roles]))

    def restarts_errors(self, role: str) -> bool:
        """Whether a member of the role is started again after its own code raised."""
        rule = self._rules[role]
        return rule.scope != "never" and rule.on_error

    def decide(self, failure: FailureInfo, history: Sequence[RestartRecord], now: float) -> Restart | Exhausted | None:
        """What to do about the failure of a member; None if its role is never restarted.

        Args:
            failure: of a member: role and rank are given.
            history: all restarts of the job so far, oldest first.
            now: in seconds since the epoch.
        """
        assert failure.role is not None and failure.rank is not None
        rule = self._rules[failure.role]
        if rule.scope == "never":
            return None
        unit, members = self._unit(failure.role, failure.rank, rule)
        recent = [record for record in history if record.unit == unit and record.at > now - rule.window_s]
        if rule.of_job is not None and len(counted := self._counted(history)) >= rule.of_job:
            times = f"{_times(counted)}, as often as --max-restarts allows"
            what = f"the job restarted members {times}, and {unit} failed. The"
            if all(record.unit == unit == JOB_UNIT for record in counted):
                what = f"the job was restarted {times}, and failed again. Its"
            return Exhausted(_exhausted(what, "--max-restarts", counted, failure, now))
        if len(recent) >= rule.max_restarts:
            times = f"{_times(recent)} within {rule.window_s:g} s"
            what = f"{unit} was restarted {times}, as often as its policy allows, and failed again. Its"
            return Exhausted(_exhausted(what, "restart(max_restarts=…)", recent, failure, now))
        record = RestartRecord(
            unit=unit, scope=rule.scope, failure=failure, at=now, delay_s=delay_before(len(recent), rule)
        )  # fmt: skip
        return Restart(record, members, len(recent) + 1, rule.max_restarts)

    def _unit(self, role: str, rank: int, rule: RestartRule) -> tuple[str, tuple[tuple[str, int], ...]]:
        own = self._fused.get(role, (role,))
        if rule.scope == "member":
            return f"{'+'.join(own)}:{rank}", tuple((name, rank) for name in own)
        roles = own if rule.scope == "role" else tuple(self._sizes)
        members = tuple((name, rank) for name in roles for rank in range(self._sizes[name]))
        return ("+".join(own) if rule.scope == "role" else JOB_UNIT), members

    def _counted(self, history: Sequence[RestartRecord]) -> list[RestartRecord]:
        """Restarts that count against the job's own budget."""
        rules = ((record, self._rules.get(record.failure.role or "")) for record in history)
        return [record for record, rule in rules if rule is not None and rule.of_job is not None]


def _exhausted(what: str, more: str, counted: Sequence[RestartRecord], failure: FailureInfo, now: float) -> FailureInfo:
    first = counted[0] if counted else None
    cause = first.cause if first is not None else failure.message
    origin = first.failure if first is not None else failure  # later ones may only follow from it
    since = f", {now - first.at:.0f} s ago" if first is not None else ""
    message = (
        f"{what} first failure{since}: {cause}\n"
        f"The last one: {failure.message}\nRemove the cause, or allow more with {more}"
    )
    return FailureInfo(
        message,
        failure.role,
        failure.rank,
        now,
        origin.exit or failure.exit,
        origin.remote_traceback or failure.remote_traceback,
        "RestartBudgetExhausted",
    )


def _times(records: Sequence[RestartRecord]) -> str:
    return f"{len(records)} time{'' if len(records) == 1 else 's'}"


def strictest(rules: Sequence[RestartRule]) -> RestartRule:
    """The rule of a process with several roles: what the strictest of them allows. Errors of their code are only
    restarted after if all of them say so."""
    first = min(rules, key=lambda rule: STRICTNESS.index(rule.scope))
    return replace(
        first,
        max_restarts=min(rule.max_restarts for rule in rules),
        on_error=all(rule.on_error for rule in rules),
        of_job=min((rule.of_job for rule in rules if rule.of_job is not None), default=None),
    )


def delay_before(earlier: int, rule: RestartRule) -> float:
    """Seconds before a restart that ``earlier`` others precede within the window: 0, then doubling to the maximum."""
    if earlier == 0:
        return 0.0
    exponent = min(earlier - 1, 60)  # beyond that any delay is at its maximum
    return float(min(rule.max_delay_s, rule.delay_s * 2.0**exponent))
