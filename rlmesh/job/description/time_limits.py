"""How long each phase of a job may take."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

__all__ = ["MAY_BE_0", "TimeLimits"]

MAY_BE_0 = frozenset({"node_wait_s"})
"""All other limits must leave some time."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long each phase may take, in seconds. There is no wait without a limit.

    Attributes:
        agents_s: from the master's start until every agent has registered.
        start_s: from a member's spawn until its endpoint is bound; what the zygote imports ahead is in it.
        setup_s: from then until its ``setup()`` returned: its imports and its construction are in it.
        teardown_s: for ``teardown()`` at the end of the job, for the drivers and then for the others.
        settle_s: how long a failure that may only follow from another one waits for that other one.
        fail_grace_s: between the request to end and SIGKILL when a job failed.
        exit_s: from SIGKILL until the agent must have reported the exit.
        hang_s: how long a member that has something to do may be without a sign of life: a report, a step's boundary,
            a call or an answer.
        lease_s: with several nodes: a node that hears nothing of the master for so long ends its members itself; some
            seconds later they are started on other nodes.
        node_wait_s: how long members of a lost node, for which there is no room, wait for a node to come.
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
        """These limits, except where ``others`` differ from the defaults."""
        default = TimeLimits()
        given = {f.name: value for f in fields(self) if (value := getattr(others, f.name)) != getattr(default, f.name)}
        return replace(self, **given)
