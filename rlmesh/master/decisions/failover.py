"""The restart decision: whether a failed member is restarted, with which other members, and when. No I/O.

A failure belongs to a *unit*, by the scope of its role's restart rule: the member, its role, or the job. The number of
restarts of a unit within the rule's window is limited. The first restart is immediate, later ones are delayed
exponentially. A failure beyond the limit ends the job, and the reported error is the first one of the window.
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
"""Scopes, strictest first. Roles that share a process get the strictest scope among them."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A decision to restart members.

    Attributes:
        record: the entry for the job's restart history.
        members: role and rank of each member to restart.
        number: restarts of the unit within the window, including this one.
        budget: maximum number of restarts of the unit within the window.
    """

    record: RestartRecord
    members: tuple[tuple[str, int], ...]
    number: int
    budget: int


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A decision to end the job with this failure, because the unit has used up its restarts."""

    failure: FailureInfo


class FailoverCoordinator:
    """Decides about restarts for one job.

    Args:
        rules: restart rule of each role.
        sizes: number of members of each role.
        fusions: sets of roles that share processes, rank by rank, and therefore fail and restart together.
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
        """True if a member of the role is restarted after its own code raised."""
        rule = self._rules[role]
        return rule.scope != "never" and rule.on_error

    def decide(self, failure: FailureInfo, history: Sequence[RestartRecord], now: float) -> Restart | Exhausted | None:
        """Decide what to do about the failure of a member; None if its role is never restarted.

        Args:
            failure: the failure, with role and rank.
            history: all restarts of the job so far, oldest first.
            now: seconds since the epoch.
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
        """Return the restarts that count against the job's own budget."""
        rules = ((record, self._rules.get(record.failure.role or "")) for record in history)
        return [record for record, rule in rules if rule is not None and rule.of_job is not None]


def _exhausted(what: str, more: str, counted: Sequence[RestartRecord], failure: FailureInfo, now: float) -> FailureInfo:
    first = counted[0] if counted else None
    cause = first.cause if first is not None else failure.message
    origin = first.failure if first is not None else failure  # later failures may be consequences of the first
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
    """Return the rule of a process with several roles: the strictest limits, and restarts after errors only if all
    roles allow them."""
    first = min(rules, key=lambda rule: STRICTNESS.index(rule.scope))
    return replace(
        first,
        max_restarts=min(rule.max_restarts for rule in rules),
        on_error=all(rule.on_error for rule in rules),
        of_job=min((rule.of_job for rule in rules if rule.of_job is not None), default=None),
    )


def delay_before(earlier: int, rule: RestartRule) -> float:
    """Return the seconds to wait before a restart: 0 for the first one in the window, then doubling up to the
    maximum."""
    if earlier == 0:
        return 0.0
    exponent = min(earlier - 1, 60)  # any larger exponent reaches the maximum as well
    return float(min(rule.max_delay_s, rule.delay_s * 2.0**exponent))
