"""Restarts in progress: from the decision until the new processes serve. No I/O.

::

    begin    members get a new incarnation in the address book, without an address: calls to them wait
             old processes that still run are ended; new ports are reserved for elastic roles
    advance  when the old processes are gone, the delay is over and the ports are reserved: spawn
    done     when all members serve: run() is begun again where it had not finished, and everybody is notified
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from rlmesh.job.restarts import Phase, RestartEvent
from rlmesh.job.status import SERVING, ExitInfo, FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import Member, MemberId
from rlmesh.master.decisions.failover import Restart
from rlmesh.master.decisions.job_state import JobState, Recovery
from rlmesh.placement.planner import Placement

__all__ = ["Recoveries"]


class Recoveries:
    """All restarts of one job that are in progress. A member is in at most one of them."""

    def __init__(self, state: JobState) -> None:
        self._state, self._saved = state, state.saved

    def __bool__(self) -> bool:
        return bool(self._saved.recoveries)

    def begin(self, restart: Restart, places: Mapping[MemberId, Placement] | None, now: float) -> None:
        """Replace members by new incarnations.

        Args:
            restart: the decision.
            places: new placements of members that cannot stay on their node; None if there is no room before ``place``.
            now: seconds since the epoch.
        """
        context = self._state.context
        wanted = set(restart.members)
        recovery = Recovery(restart, wanted, now + restart.record.delay_s, now + self._state.limits.exit_s)
        self._merge_into(recovery)
        ended: dict[int, list[ev.ProcessKey]] = {}
        for member in self._of(wanted):
            if not member.gone:
                key = (*member.id, member.incarnation)
                recovery.outgoing[key] = member.placement.node_rank
                ended.setdefault(member.placement.node_rank, []).append(key)
            if member.spawned or member.exit is not None:
                member.next_incarnation(hidden=restart.record.scope == "member", now=now)
            if restart.record.scope != "member":
                member.has_finished = False
        context.restarts.append(restart.record)
        context.note = self._note(restart)
        # The address book goes first, so that a call made on the news of the restart reaches the new incarnation.
        self._state.do(ev.PublishBook(context.new_book()))
        self._announce(recovery, "restarting")
        for node_rank, keys in ended.items():
            self._state.do(ev.EndProcesses(node_rank, tuple(keys), self._grace_s(restart)))
        self._saved.recoveries.append(recovery)
        if places is None:
            recovery.unplaced = True
        else:
            self._place(recovery, places)

    def unplaced(self) -> set[MemberId]:
        """Return the members for which there is no room yet."""
        return {member for recovery in self._saved.recoveries if recovery.unplaced for member in recovery.members}

    def place(self, places: Mapping[MemberId, Placement]) -> None:
        """Place the members that had no room."""
        for recovery in self._saved.recoveries:
            if recovery.unplaced:
                self._place(recovery, places)

    def _place(self, recovery: Recovery, places: Mapping[MemberId, Placement]) -> None:
        context = self._state.context
        recovery.unplaced = False
        if places and context.plan is not None:
            for member in self._of(recovery.members):
                member.placement = places.get(member.id, member.placement)
            placements = tuple(member.placement for member in context.members.values())
            context.plan = replace(context.plan, placements=placements)
        for role in self._elastic_roles(recovery.members):
            leader = context.members[role, 0].placement.node_rank
            self._saved.ports_asked.setdefault(role, []).append(leader)
            self._state.do(ev.ReservePort(role, leader, instead_of=self._saved.ports.get(role)))

    def _merge_into(self, recovery: Recovery) -> None:
        """Merge earlier restarts of the same members into this one: a larger restart takes over smaller ones, and a
        failure during a restart begins it anew."""
        remaining = []
        for other in self._saved.recoveries:
            if other.members & recovery.members:
                recovery.outgoing |= {key: at for key, at in other.outgoing.items() if key[:2] in recovery.members}
                other.members -= recovery.members
                other.outgoing = {key: at for key, at in other.outgoing.items() if key[:2] not in recovery.members}
            if other.members:
                remaining.append(other)
        self._saved.recoveries = remaining

    def _grace_s(self, restart: Restart) -> float:
        """Return the grace period: a group that has lost a rank cannot end cleanly and others wait for it; a whole job
        can."""
        return self._state.limits.fail_grace_s if restart.record.scope == "job" else 0.0

    def note_exit(self, exit: ExitInfo) -> str | None:
        """Return why a process was ended if its exit belongs to a restart, else None; the exit is recorded."""
        key = (exit.role, exit.rank, exit.incarnation)
        for recovery in self._saved.recoveries:
            if key in recovery.outgoing:
                del recovery.outgoing[key]
                record = recovery.restart.record
                own = (exit.role, exit.rank) == (record.failure.role, record.failure.rank)
                return record.cause if own else f"{record.unit} is started again: {record.cause}"
        return None

    def node_lost(self, node_rank: int) -> None:
        """Record that no old process runs on a lost node, and that no answer comes from it."""
        for recovery in self._saved.recoveries:
            recovery.outgoing = {key: at for key, at in recovery.outgoing.items() if at != node_rank}
        self._saved.ports_asked = {
            role: [at for at in asked if at != node_rank] for role, asked in self._saved.ports_asked.items()
        }

    def port_reserved(self, role: str, node_rank: int | None) -> None:
        asked = self._saved.ports_asked.get(role)
        if asked:
            asked.remove(node_rank if node_rank in asked else asked[0])

    def abandon(self) -> list[Member]:
        """Cancel all restarts because the job ends; return members whose new process does not serve yet."""
        unfinished = []
        for recovery in self._saved.recoveries:
            for member in self._of(recovery.members):
                if not member.gone and member.state not in SERVING:
                    unfinished.append(member)
                elif member.state == "restarting":
                    member.state = "failed"
        self._saved.recoveries.clear()
        return unfinished

    def advance(self, now: float) -> FailureInfo | None:
        """Spawn members that are due, finish restarts that serve; return a failure if an old process does not end."""
        for recovery in list(self._saved.recoveries):
            if recovery.outgoing and now >= recovery.gone_by:
                role, rank, _ = min(recovery.outgoing)
                return FailureInfo(
                    f"{role}:{rank} is to be restarted, but the end of its old process was not reported within "
                    f"{self._state.limits.exit_s:g} s", role, rank, now,
                )  # fmt: skip
            if not recovery.spawned and not recovery.outgoing and not recovery.unplaced and now >= recovery.start_at:
                if not any(self._saved.ports_asked.get(role) for role in self._elastic_roles(recovery.members)):
                    self._spawn(recovery, now)
            elif recovery.spawned and all(member.state in SERVING for member in self._of(recovery.members)):
                self._done(recovery, now)
        return None

    def _spawn(self, recovery: Recovery, now: float) -> None:
        recovery.spawned = True
        of_node: dict[int, list[MemberId]] = {}
        events = {event.role: event for event in self._events(recovery, "restarting")}
        for member in self._of(recovery.members):
            member.spawned = True
            member.restart = events[member.placement.role]
            member.enter("starting", now)
            of_node.setdefault(member.placement.node_rank, []).append(member.id)
        for node_rank, ids in of_node.items():
            self._state.do(ev.Spawn(node_rank, tuple(ids)))

    def _done(self, recovery: Recovery, now: float) -> None:
        self._saved.recoveries.remove(recovery)
        context, record = self._state.context, recovery.restart.record
        context.restarts = [replace(r, ready_at=now) if r == record else r for r in context.restarts]
        if context.note == self._note(recovery.restart):
            context.note = ""
        if context.stage == "running":
            for member in self._of(recovery.members):
                if not member.has_finished:
                    self._state.do(ev.BeginRun(member.id))
        self._announce(recovery, "ready")

    def _announce(self, recovery: Recovery, phase: Phase) -> None:
        self._state.do(*(ev.TellRestart(event) for event in self._events(recovery, phase)))

    def _events(self, recovery: Recovery, phase: Phase) -> list[RestartEvent]:
        record, of_role = recovery.restart.record, dict[str, list[Member]]()
        for member in self._of(recovery.members):
            of_role.setdefault(member.placement.role, []).append(member)
        return [
            RestartEvent(
                role=role,
                ranks=tuple(member.placement.rank for member in members),
                phase=phase,
                scope=record.scope,
                incarnations=tuple(member.incarnation for member in members),
                cause=record.cause,
                number=recovery.restart.number,
                at=record.at,
                restored=tuple(_restored(member) if phase == "ready" else None for member in members),
            )
            for role, members in of_role.items()
        ]

    def _note(self, restart: Restart) -> str:
        record = restart.record
        when = f" in {record.delay_s:g} s" if record.delay_s else ""
        return f"{record.unit} is restarted{when} (restart {restart.number} of {restart.budget}): {record.cause}"

    def _of(self, members: Iterable[MemberId]) -> list[Member]:
        return [self._state.context.members[member] for member in sorted(members)]

    def _elastic_roles(self, members: Collection[MemberId]) -> list[str]:
        elastic = {role.name for role in self._state.spec.roles if role.backend == "elastic"}
        return sorted({role for role, _ in members} & elastic)


def _restored(member: Member) -> int | None:
    """Return the weights version that the member's current process reported as restored."""
    restart = member.restart
    rank = member.placement.rank
    return restart.restored[restart.ranks.index(rank)] if restart is not None and rank in restart.ranks else None
