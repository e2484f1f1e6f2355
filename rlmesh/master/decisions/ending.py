"""The end of a job: teardown when its drivers are done, or a stop of all members. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.context import Member, MemberId
from rlmesh.master.decisions.job_state import JobState


class Ending:
    """The last stage of one job."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    def drivers(self) -> list[Member]:
        """Return the members whose ``run()`` the job waits for."""
        spec = self._state.spec
        named = spec.drivers()
        roles = {role.name: role for role in spec.roles}
        return [
            member
            for member in self._state.context.members.values()
            if (member.placement.role in named if named is not None
                else member.has_run and roles[member.placement.role].driver is not False)
        ]  # fmt: skip

    def end_all(self, reason: str, grace_s: float, now: float) -> None:
        """Ask all living members to end; their processes are ended when the grace period is over."""
        self._state.context.stage = "stopping"
        living = self._state.living()
        if bound := tuple(member.id for member in living if member.endpoint):
            self._state.do(ev.AskToStop(bound, reason, ends=True))
        self.stop_members(living, grace_s, now)

    def stop_members(self, members: Iterable[Member], grace_s: float, now: float) -> None:
        """End the processes of members, by SIGTERM and later SIGKILL."""
        of_node: dict[int, list[MemberId]] = {}
        for member in members:
            member.asked_to_end = member.ended_by_us = True
            if member.state != "failed":
                member.enter("stopping", now)
            of_node.setdefault(member.placement.node_rank, []).append(member.id)
        for node_rank, ids in of_node.items():
            self._state.do(ev.StopMembers(node_rank, tuple(ids), grace_s))
        self._state.context.stop_grace_s = grace_s
        self._state.saved.deadlines.exits_at = now + grace_s + self._state.limits.exit_s

    def teardown(self, members: Sequence[Member], now: float) -> None:
        """Let members finish their current call, run ``teardown()`` and end by themselves, together with the members
        that share their processes."""
        members = list({other.id: other for m in members for other in self._state.context.sharing_process(m)}.values())
        if busy := tuple(member.id for member in members if member.state == "running"):
            self._state.do(ev.AskToStop(busy, "the roles that drive the job are done"))
            self._state.saved.deadlines.runs_at = now + self._state.spec.grace_s
        for member in members:
            member.enter("stopping", now)
            member.asked_to_end = True
            self._state.do(ev.Teardown(member.id, self._state.saved.stop.final_request()))
        # Saving after a stop may take until the stop's own deadline, which can be later than an ordinary teardown's.
        self._state.saved.deadlines.teardown_at = max(
            now + self._state.limits.teardown_s, self._state.saved.stop.ends_at or 0.0
        )

    def teardown_failed(self, member: Member, why: str, now: float) -> None:
        """End the process of a member that cannot run ``teardown()``."""
        if member.state == "stopping" and not member.ended_by_us:
            self._end_late(self._state.context.sharing_process(member), f"it cannot run teardown() ({why})", now)

    def end_if_gone(self, failing: bool, now: float) -> None:
        """Advance the end: tear down the other members after the drivers, finish the job after the last process."""
        context = self._state.context
        living = self._state.living()
        if context.ends_as == "succeeded" and not failing:
            waiting = [member for member in living if member.state != "stopping"]
            if waiting and len(waiting) == len(living):  # the drivers are gone
                self.teardown(waiting, now)
        if not living:
            if failing and context.ends_as == "succeeded":
                context.ends_as = "failed"
            context.stopped_at = self._state.saved.stop.last_step
            early = context.ends_as == "succeeded" and context.stopped_at is not None
            context.stage = "stopped" if early else context.ends_as

    def check_deadlines(self, now: float) -> None:
        """End members that are late, and count members as ended whose exit was never reported."""
        deadlines, limits, living = self._state.saved.deadlines, self._state.limits, self._state.living()
        if deadlines.take("runs_at", now):
            self._end_late([member for member in living if member.in_run], "run() did not stop", now)
        if deadlines.take("teardown_at", now):
            late = [member for member in living if member.asked_to_end]
            self._end_late(late, f"teardown() took longer than {limits.teardown_s:g} s", now)
        if deadlines.take("exits_at", now):
            for member in living:
                if member.ended_by_us:
                    member.exit = ExitInfo(*member.id, member.incarnation, member.pid, None, None, now)
                    member.enter("failed", now)
                    self._state.context.note = f"{member.name} (pid {member.pid}): its end was never reported"

    def _end_late(self, members: Sequence[Member], why: str, now: float) -> None:
        if members:
            names = ", ".join(member.name for member in members)
            self._state.context.note = f"{names}: {why}; ended by a signal"
            self.stop_members(members, self._state.spec.grace_s, now)
