"""A common stop: the step at which all drivers of a job stop, after a notice that the job must end soon. No I/O.

::

    notice → every driver is asked for its step, and held at its next boundary
           → all have answered: max(steps) + 1 is set, and the drivers continue to that step
           → each driver reports where it stopped; different steps are an error

A driver whose ``run()`` returns or whose process dies meanwhile is not waited for; a restarted driver gets the step
that was set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rlmesh.job.context import StopRequest
from rlmesh.master import events as ev
from rlmesh.master.context import MemberId

__all__ = ["StopTogether"]


@dataclass(slots=True)
class StopTogether:
    """One common stop. Times are seconds since the epoch.

    Attributes:
        grace_s: between SIGTERM and SIGKILL if the time is up.
        reason: who gave notice; empty without a notice.
        ends_at: when the time is up. The job is stopped then, whatever step each driver is at.
        request: what the drivers were told.
        reached: step at which each driver stopped.
        within_s: time between the notice and ``ends_at``.
        begun: the drivers were asked.
        asked: drivers that were asked and still run.
        steps: the steps that drivers answered.
    """

    grace_s: float
    reason: str = ""
    ends_at: float | None = None
    request: StopRequest | None = None
    reached: dict[MemberId, int] = field(default_factory=dict)
    within_s: float = 0.0
    begun: bool = False
    asked: set[MemberId] = field(default_factory=set)
    steps: dict[MemberId, int | None] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """True if there was a notice and the drivers were not asked yet."""
        return bool(self.reason) and not self.begun

    @property
    def last_step(self) -> int | None:
        """Return the step at which the drivers stopped; None if no driver stopped because of the notice."""
        return max(self.reached.values(), default=None)

    def final_request(self) -> StopRequest | None:
        """Return why and after which step the job stopped, for ``on_stop()``; None if it did not stop because of the
        notice."""
        if self.last_step is None:
            return None
        return StopRequest(self.reason, self.last_step, self.within_s)

    def notice(self, reason: str, within_s: float, grace_s: float, now: float) -> bool:
        """Record a notice; False if there was one before."""
        if self.reason:
            return False
        self.reason, self.ends_at, self.within_s, self.grace_s = reason, now + within_s, within_s, grace_s
        return True

    def begin(self, drivers: Iterable[MemberId]) -> list[ev.Action]:
        """Ask the drivers whose ``run()`` is running."""
        self.begun = True
        self.asked = set(drivers)
        if not self.asked:
            return []
        return [ev.HoldSteps(tuple(sorted(self.asked)), self.reason)]

    def step_held(self, member: MemberId, step: int | None) -> list[ev.Action]:
        """Record a driver's answer with its step."""
        if member not in self.asked:
            return []
        self.steps[member] = step
        return self._set_step()

    def run_ended(self, member: MemberId) -> list[ev.Action]:
        """Record that a driver's ``run()`` returned, or that it did not answer and will be found dead."""
        if member not in self.asked:
            return []
        self.asked.discard(member)
        self.steps.pop(member, None)
        return self._set_step()

    def run_began(self, member: MemberId) -> list[ev.Action]:
        """Record that a restarted driver began its ``run()`` after the others were asked."""
        if not self.begun or member in self.asked:
            return []
        self.asked.add(member)
        if self.request is None:
            return [ev.HoldSteps((member,), self.reason)]
        return [ev.SetStop((member,), self.request)]

    def repeated_orders(self) -> list[ev.Action]:
        """Repeat the request to drivers that may have missed it; a driver uses the first request that it gets."""
        return [ev.SetStop(tuple(sorted(self.asked)), self.request)] if self.request and self.asked else []

    def _set_step(self) -> list[ev.Action]:
        if self.request is not None or not self.asked or self.asked - set(self.steps):
            return []
        steps = [step for step in self.steps.values() if step is not None]
        step = max(steps) + 1 if steps else None  # no driver reached a boundary yet: all stop at their first
        self.request = StopRequest(self.reason, step, self.within_s)
        return [ev.SetStop(tuple(sorted(self.asked)), self.request)]

    def stopped(self, member: MemberId, step: int) -> str:
        """Record at which step a driver stopped; return an error message, or an empty text."""
        self.reached[member] = step
        others = {at for at in self.reached.values() if at != step}
        if not others:
            return ""
        where = ", ".join(f"{role}:{rank} at step {at}" for (role, rank), at in sorted(self.reached.items()))
        return (
            f"not all ranks stopped at the same step: {where}. Call current_worker().step_boundary(step) once per "
            "step in every rank, with the same steps, and return from run() when it returns a request"
        )

    def expired(self, now: float, drivers: Collection[str]) -> str:
        """Return the message about a stop that ran out of time, once; empty if there is time left."""
        if self.ends_at is None or now < self.ends_at:
            return ""
        self.ends_at = None
        step = None if self.request is None else self.request.step
        asked = "was asked to stop" if step is None else f"was to stop at step {step}"
        who = ", ".join(drivers) or "no driver"
        return (
            f"{self.reason}, and {who} {asked}, but is still in run() after {self.within_s:g} s: call "
            "current_worker().step_boundary(step) at the end of each step and return when it gives a request"
        )
