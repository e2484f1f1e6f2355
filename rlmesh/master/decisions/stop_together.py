"""The step at which all drivers of a job stop, after a notice that the job must end soon. Pure.

::

    notice → every driver is asked for its step, and held at its next boundary
           → all have answered: max(steps) + 1 is set, they go on to it
           → each tells where it stopped; two that stopped at different steps are an error

A driver whose ``run()`` returns or whose process dies meanwhile is not waited for; one that is started again gets
the step that was set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rlmesh.job.context import StopRequest
from rlmesh.master import events as ev
from rlmesh.master.context import MemberId

__all__ = ["StopTogether"]


@dataclass(slots=True)
class StopTogether:
    """One stop. Times are seconds since the epoch.

    Attributes:
        grace_s: between SIGTERM and SIGKILL if patience ends.
        reason: who gave notice, empty as long as nobody did.
        ends_at: when patience ends, and the job is stopped wherever it is.
        request: what the drivers were told.
        reached: at which step each of them stopped.
    """

    KEPT: ClassVar[Mapping[str, object]] = {
        "grace_s": float, "reason": str, "ends_at": float | None, "request": StopRequest | None,
        "reached": dict[MemberId, int], "_within_s": float, "_begun": bool, "_asked": set[MemberId],
        "_steps": dict[MemberId, int | None],
    }  # fmt: skip

    grace_s: float
    reason: str = ""
    ends_at: float | None = None
    request: StopRequest | None = None
    reached: dict[MemberId, int] = field(default_factory=dict)
    _within_s: float = 0.0
    _begun: bool = False
    _asked: set[MemberId] = field(default_factory=set)
    _steps: dict[MemberId, int | None] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """Whether somebody gave notice and the drivers were not asked yet."""
        return bool(self.reason) and not self._begun

    @property
    def last_step(self) -> int | None:
        """The step at which the drivers stopped; None if none of them stopped because of this."""
        return max(self.reached.values(), default=None)

    def last_word(self) -> StopRequest | None:
        """For ``on_stop()``: why and after which step the job stopped; None if it did not stop because of this."""
        if self.last_step is None:
            return None
        return StopRequest(self.reason, self.last_step, self._within_s)

    def notice(self, reason: str, within_s: float, grace_s: float, now: float) -> bool:
        """Somebody gave notice; False if somebody had before."""
        if self.reason:
            return False
        self.reason, self.ends_at, self._within_s, self.grace_s = reason, now + within_s, within_s, grace_s
        return True

    def begin(self, drivers: Iterable[MemberId]) -> list[ev.Action]:
        """Ask the drivers whose ``run()`` runs."""
        self._begun = True
        self._asked = set(drivers)
        if not self._asked:
            return []
        return [ev.HoldSteps(tuple(sorted(self._asked)), self.reason)]

    def held(self, member: MemberId, step: int | None) -> list[ev.Action]:
        """A driver has answered with its step."""
        if member not in self._asked:
            return []
        self._steps[member] = step
        return self._set()

    def gone(self, member: MemberId) -> list[ev.Action]:
        """A driver's ``run()`` returned, or it did not answer and will be found dead."""
        if member not in self._asked:
            return []
        self._asked.discard(member)
        self._steps.pop(member, None)
        return self._set()

    def joined(self, member: MemberId) -> list[ev.Action]:
        """A driver began its ``run()``: one that was started again, after the others were asked."""
        if not self._begun or member in self._asked:
            return []
        self._asked.add(member)
        if self.request is None:
            return [ev.HoldSteps((member,), self.reason)]
        return [ev.SetStop((member,), self.request)]

    def say_again(self) -> list[ev.Action]:
        """To drivers that may not have heard it: the first request that one gets is the one that counts."""
        return [ev.SetStop(tuple(sorted(self._asked)), self.request)] if self.request and self._asked else []

    def _set(self) -> list[ev.Action]:
        if self.request is not None or not self._asked or self._asked - set(self._steps):
            return []
        steps = [step for step in self._steps.values() if step is not None]
        step = max(steps) + 1 if steps else None  # nobody was at a boundary yet: all stop at their first
        self.request = StopRequest(self.reason, step, self._within_s)
        return [ev.SetStop(tuple(sorted(self._asked)), self.request)]

    def stopped(self, member: MemberId, step: int) -> str:
        """A driver stopped at this step. Says what is wrong with it, empty if nothing is."""
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
        """What to say if the time is up, empty if it is not; it is said once."""
        if self.ends_at is None or now < self.ends_at:
            return ""
        self.ends_at = None
        step = None if self.request is None else self.request.step
        asked = "was asked to stop" if step is None else f"was to stop at step {step}"
        who = ", ".join(drivers) or "no driver"
        return (
            f"{self.reason}, and {who} {asked}, but is still in run() after {self._within_s:g} s: call "
            "current_worker().step_boundary(step) at the end of each step and return when it gives a request"
        )
