"""Deadlines of a job, and the messages that say which member missed one. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rlmesh.job.status import FailureInfo
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.root_cause import Weight
from rlmesh.master.jobspec import TimeLimits

SLOW_START_S = 10.0
SHOWN_NAMES = 5


@dataclass(slots=True)
class WaitDeadlines:
    """Deadlines of one job, in seconds since the epoch; None if a deadline is not armed."""

    agents_at: float | None = None
    runs_at: float | None = None
    teardown_at: float | None = None
    exits_at: float | None = None

    def passed(
        self, context: JobContext, now: float, last_lines: Callable[[str], tuple[str, ...]],
        activity_of: Callable[[Member], str] = lambda member: "",
    ) -> Iterator[tuple[Weight, FailureInfo]]:  # fmt: skip
        """Yield one failure for each start that took too long.

        Args:
            context: the job.
            now: seconds since the epoch.
            last_lines: reads the end of a member's log.
            activity_of: returns a text such as ``stopped for 4 s``; empty if nothing is known.
        """
        if self.agents_at is not None and now >= self.agents_at:
            missing = sorted(set(range(context.spec.nnodes)) - set(context.nodes))
            nodes = ", ".join(map(str, missing))
            message = (
                f"waited {context.spec.limits.agents_s:g} s for the agent of node {nodes}, which did not register. "
                f"See logs/agent-{missing[0]}.log in the run directory"
            )
            self.agents_at = None
            yield Weight.OWN, FailureInfo(message, at=now)
        for member in context.members.values():
            name, limit, awaited = _limit_of(member, context.spec.limits)
            if limit is not None and now - member.since >= limit:
                lines = last_lines(member.log_path)
                tail = "\n".join(("its last log lines:", *lines)) if lines else "its log is empty"
                who = f"{member.name} (pid {member.pid or 'unknown'})"
                doing = f" ({activity})" if (activity := activity_of(member)) else ""
                message = f"{who} did not {awaited} within {limit:g} s{doing}, see limits({name}=…); {tail}"
                yield Weight.OWN, FailureInfo(message, *member.id, at=now)

    def waiting_for(self, context: JobContext, now: float) -> str:
        """Return a note that names the members a slow start waits for; empty while the start is not slow."""
        if now - context.started_at < SLOW_START_S:
            return ""
        names = [m.name for m in context.members.values() if m.state in ("starting", "bound", "restarting")]
        shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
        return f"waiting for {len(names)} members to be set up: {shown}" if names else ""

    def take(self, which: Literal["runs_at", "teardown_at", "exits_at"], now: float) -> bool:
        """True if the deadline has passed; this disarms it."""
        at: float | None = getattr(self, which)
        if at is None or now < at:
            return False
        setattr(self, which, None)
        return True


def _limit_of(member: Member, limits: TimeLimits) -> tuple[str, float | None, str]:
    if member.state == "starting":
        return "start_s", limits.start_s, "start and bind its endpoint"
    if member.state == "bound":
        return "setup_s", limits.setup_s, "finish setup()"
    return "", None, ""
