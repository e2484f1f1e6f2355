"""Health checks of serving members: asks for progress, orders stacks of a hanging member, hands on failures. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from rlmesh.job.status import SERVING, FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import Member
from rlmesh.master.decisions.job_state import JobState
from rlmesh.master.monitoring.diagnosis import DiagnosisManager, Hang, describe_hang, narrowed

__all__ = ["HealthWatch"]

ANSWER_WAIT_S = 5.0
COMING = frozenset({"restarting", "starting", "bound"})
STACKS_WAIT_S = 10.0
"""Longer than the executor waits for agents."""


class HealthWatch:
    """Checks one job. ``fail`` takes a member's failure: the member is restarted, or the job ends."""

    def __init__(self, state: JobState, fail: Callable[[FailureInfo, float], None]) -> None:
        self._state, self._health, self._fail = state, state.saved.health, fail
        self._diagnosis = DiagnosisManager(state.limits.hang_s, self._health)

    def take(self, event: ev.ProgressSeen | ev.StacksTaken | ev.DeviceFailed, now: float) -> None:
        match event:
            case ev.ProgressSeen(member, None, doing):
                self._diagnosis.missed(member, now, doing)
            case ev.ProgressSeen(member, progress) if progress is not None:
                self._diagnosis.answered(member, progress, now)
            case ev.StacksTaken():
                self._conclude(event, now)
            case ev.DeviceFailed(node_rank, uuid, what):
                self._device_failed(node_rank, uuid, what, now)

    def check(self, now: float) -> None:
        """Ask for progress if it is time, and begin to handle members that hang."""
        if self._state.context.stage != "running":
            return
        serving = self._serving()
        if self._health.hang is not None:
            if now >= self._health.stacks_by:
                self._conclude(ev.StacksTaken((), "none could be taken"), now)
            return
        if self._diagnosis.due(now):
            wait_s = min(ANSWER_WAIT_S, 2 * self._diagnosis.poll_s)
            self._state.do(ev.AskProgress(tuple(member.key for member in serving), wait_s))
        coming = {member.name for member in self._state.context.members.values() if member.state in COMING}
        self._health.hang = self._diagnosis.find_hang({member.key for member in serving}, coming, now)
        if self._health.hang is not None:
            self._health.stacks_by = now + STACKS_WAIT_S
            names = ", ".join(cause.name for cause in self._health.hang.causes)
            self._state.context.note = f"{names} hangs; the stacks of all members are taken"
            bound = [member for member in self._state.living() if member.endpoint]
            self._state.do(ev.TakeStacks(tuple(member.key for member in bound)))

    def _conclude(self, taken: ev.StacksTaken, now: float) -> None:
        """Report a failure for each cause, unless its member was replaced, or restarted together with another cause."""
        hang, self._health.hang = self._health.hang, None
        if hang is None or self._state.context.stage != "running":
            return
        self._diagnosis.forget()
        stacks = {(stack.role, stack.rank, stack.incarnation): stack for stack in taken.stacks}
        hang = narrowed(hang, stacks)
        for place, cause in enumerate(hang.causes):
            if cause.key in {member.key for member in self._serving()}:
                others = (*hang.causes[:place], *hang.causes[place + 1 :])
                own = Hang((cause, *others), hang.others)
                self._fail(describe_hang(own, stacks, self._state.limits.hang_s, taken.path, now), now)

    def _device_failed(self, node_rank: int, uuid: str, what: str, now: float) -> None:
        on_it = [
            member
            for member in self._state.living()
            if member.placement.node_rank == node_rank
            and any(share.device.uuid == uuid for share in member.placement.devices)
        ]
        where = f"device {uuid} of node {self._state.node_name(node_rank)} is bad: {what}"
        self._state.context.note = where
        for member in on_it:
            if member.key in {living.key for living in self._state.living()}:
                info = FailureInfo(f"{member.name} (pid {member.pid}) is on a bad device: {where}", *member.id, at=now,
                                   kind="BadDevice")  # fmt: skip
                self._fail(info, now)

    def _serving(self) -> list[Member]:
        return [member for member in self._state.living() if member.state in SERVING and member.endpoint]
