"""Failure handling: a failed member is restarted, alone or with others, or the job ends. No I/O.

``failover`` decides whether to restart, ``replacement`` where, and ``recovery`` carries the restart out. A failure that
may be the consequence of another one waits a moment for a better explanation (``root_cause``).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from rlmesh.job.status import SERVING, ExitInfo, FailureInfo, MemberState, RestartRecord
from rlmesh.master import events as ev
from rlmesh.master.context import Member
from rlmesh.master.decisions.ending import Ending
from rlmesh.master.decisions.failover import Exhausted, FailoverCoordinator, Restart
from rlmesh.master.decisions.job_state import JobState
from rlmesh.master.decisions.recovery import Recoveries
from rlmesh.master.decisions.replacement import ReplacementPlanner
from rlmesh.master.decisions.root_cause import RankedFailure, Weight, death_message, first_causes
from rlmesh.master.monitoring.graph import describe_touched

__all__ = ["FailureHandler"]

_DOING: dict[MemberState, str] = {
    "starting": "while it started",
    "bound": "while it was set up",
    "ready": "while it served calls",
    "running": "during run()",
    "finished": "after run()",
    "stopping": "during teardown()",
}
# A ready member runs only run(); it may fail before the report that run() began arrives.
_PHASE: dict[MemberState, str] = {
    "starting": "could not start",
    "bound": "could not be set up",
    "ready": "failed in run()",
    "running": "failed in run()",
    "finished": "failed",
    "stopping": "failed in teardown()",
}


class FailureHandler:
    """Handles the failures of one job. Truthy while there are failures that are not handled yet."""

    def __init__(
        self, state: JobState, failover: FailoverCoordinator, placements: ReplacementPlanner, recoveries: Recoveries,
        ending: Ending,
    ) -> None:  # fmt: skip
        self._state, self._context, self._failures = state, state.context, state.saved.failures
        self._failover, self._placements, self._recoveries = failover, placements, recoveries
        self._ending = ending

    def __bool__(self) -> bool:
        return bool(self._failures)

    def check(self, now: float) -> None:
        """Decide what follows from the failures (restart or end) if no better explanation is expected any more."""
        if self._failures.settled(now, self._context.graph) and self._state.undecided:
            self.settle(now)

    def member_failed(self, member: Member, event: ev.MemberFailed, now: float) -> None:
        if member.ended_by_us:
            return  # a consequence of the job's own end: its calls failed, or it was interrupted
        same = [f for f in self._failures.found if f.of(*member.id) and f.info.remote_traceback == event.traceback]
        if same and event.traceback:
            return  # told again: the master that had saved it died before its answer
        message = f"{member.name} (pid {member.pid}) {_PHASE.get(member.state, 'failed')}: {event.error}"
        info = FailureInfo(message, *member.id, at=now, remote_traceback=event.traceback)
        member.enter("failed", now)
        self.fail(Weight.FOLLOWS if event.from_call else Weight.OWN, info, now, event.blames, lost=event.lost)

    def process_exited(self, exit: ExitInfo, now: float) -> None:
        if (why := self._recoveries.note_exit(exit)) is not None:
            self._state.do(ev.AnnounceLoss(replace(exit, why=why)))
            return
        member = self._context.members.get((exit.role, exit.rank))
        if member is None or member.incarnation != exit.incarnation or member.exit is not None:
            return
        served, doing = member.state in SERVING, _DOING.get(member.state, "")
        # The failure of one member of a process explains the end of all members of that process.
        has_failed = any(other.state == "failed" for other in self._context.sharing_process(member))
        expected = member.ended_by_us or (member.asked_to_end and exit.ok)
        member.exit = exit
        if member.ended_by_us and exit.signal == signal.SIGKILL:
            self._context.killed.append(member.name)
        self._state.do(*self._state.saved.stop.run_ended(member.id))
        if has_failed:
            self._failures.note_exit(*member.id, exit)
            if not self._state.undecided:
                self._context.failures = [
                    replace(f, exit=exit) if (f.role, f.rank) == member.id else f for f in self._context.failures
                ]
        if member.state != "failed":
            member.enter("exited" if expected else "failed", now)
        goes_on = self._context.stage in ("starting", "running")
        if not (expected or has_failed):
            message = death_message(exit, doing)
            info = FailureInfo(message, *member.id, at=now, exit=exit, remote_traceback=exit.noted_traceback)
            self.died(info, now)
        if goes_on:
            self._state.do(ev.AnnounceLoss(replace(exit, served=served or has_failed)))

    def died(self, info: FailureInfo, now: float) -> None:
        """Handle the unwanted end of a member: it is restarted, or the job fails."""
        touched = self._context.graph.touched_by([f"{info.role}:{info.rank}"])
        info = replace(info, touched=describe_touched(touched))
        if self._context.stage in ("starting", "running") and self._state.undecided:
            decision = self._failover.decide(info, self._context.restarts, now)
            if isinstance(decision, Restart):
                self._restart(decision, now)
                return
            if isinstance(decision, Exhausted):
                info = decision.failure
        self.fail(Weight.DEATH, info, now)

    def _restart(self, restart: Restart, now: float) -> None:
        self._failures.drop(restart.members)
        self._context.failures = self._causes()
        places = self._placements.places(restart.members, now)
        if isinstance(places, FailureInfo):
            self.fail(Weight.DEATH, places, now)
            return
        self._recoveries.begin(restart, places, now)

    def fail(
        self, weight: Weight, info: FailureInfo, now: float, blames: tuple[str, ...] = (), *, lost: bool = False
    ) -> None:
        """Record a failure. Failures after the decision to end the job are consequences and are not recorded."""
        if self._state.undecided:
            self._add(RankedFailure(weight, info, blames, lost), now)
            self._context.failures = self._causes()

    def _add(self, failure: RankedFailure, now: float) -> None:
        self._failures.add(failure, now + self._state.limits.settle_s)

    def _causes(self, restarts: Sequence[RestartRecord] = ()) -> list[FailureInfo]:
        return first_causes(self._failures.found, self._context.graph, restarts)

    def settle(self, now: float) -> None:
        """Handle failures without a better explanation: restart their members where the rule allows it, else end the
        job."""
        for failure in list(self._failures.found):
            info = failure.info
            if failure.weight is Weight.DEATH or info.role is None or not self._failover.restarts_errors(info.role):
                continue
            if (info.role, info.rank) not in {(f.info.role, f.info.rank) for f in self._failures.found}:
                continue  # the restart for an earlier failure included this member
            decision = self._failover.decide(info, self._context.restarts, now)
            if isinstance(decision, Restart) and self._context.stage in ("starting", "running"):
                self._restart(decision, now)
            elif isinstance(decision, Exhausted):
                self._failures.drop([(info.role, info.rank or 0)])
                self._add(RankedFailure(Weight.DEATH, decision.failure), now)
        self._context.failures = self._causes()
        if self._failures:
            self._context.failures = self._causes(self._context.restarts)
            self._context.ends_as = "failed"
            self._recoveries.abandon()
            self._ending.end_all("the job failed", self._state.limits.fail_grace_s, now)
