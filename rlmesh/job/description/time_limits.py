"""Time limits of a job's phases."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["MAY_BE_0", "TimeLimits"]

MAY_BE_0 = frozenset({"node_wait_s"})
"""Limits that may be 0; all others must be positive."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of a job's phases, in seconds. There is no wait without a limit.

    Attributes:
        agents_s: from the master's start until every agent has registered.
        start_s: from a member's spawn until its endpoint is bound, including the zygote's preloaded imports.
        setup_s: from then until its ``setup()`` returned, including its imports and its construction.
        teardown_s: for ``teardown()`` at the end of the job, for the drivers and then for the others.
        settle_s: how long a failure that may be the consequence of another one waits for that other one.
        fail_grace_s: between the request to end and SIGKILL when a job failed.
        exit_s: from SIGKILL until the agent must have reported the exit.
        hang_s: how long a member with work may be without a sign of life: a report, a step boundary,
            a call or an answer.
        lease_s: with several nodes: time without a message from the master after which a node ends its members itself;
            some seconds later they are started on other nodes.
        node_wait_s: how long members of a lost node wait for another node if there is no room for them.
    """

    agents_s: float = 30.0
    start_s: float = 120.0
    setup_s: float = 1800.0
    teardown_s: float = 60.0
    settle_s: float = 0.3
    fail_grace_s: float = 0.7
    exit_s: float = 5.0
    hang_s: float = 600.0
    lease_s: float = 15.0
    node_wait_s: float = 0.0

    def under(self, others: TimeLimits) -> TimeLimits:
        """Return these limits, except where ``others`` differ from the defaults."""
        default = TimeLimits()
        given = {f.name: value for f in fields(self) if (value := getattr(others, f.name)) != getattr(default, f.name)}
        return replace(self, **given)
