"""Hang detection: members' progress reports in, a finding out. No I/O.

A member **hangs** if it has work, a running call or ``run()``, and for the limit it has neither reported, nor passed a
step boundary, nor sent a call or got an answer. An idle member never hangs. A member that does not answer (it holds the
interpreter lock, or is stopped) is judged by its last answer.

Among several hanging members, the cause is the one that waits for no other member: the others wait for it. If each
waits for another one, the causes are the members that wait for each other in a circle; members that only wait for a
circle are not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rlmesh.job.status import FailureInfo, MemberProgress, MemberStack

__all__ = ["DiagnosisManager", "Hang", "Quiet", "causes_of", "describe_hang", "quiet_for"]

SHORTEST_POLL_S, LONGEST_POLL_S = 0.2, 15.0
POLLS_PER_LIMIT = 8

Key = tuple[str, int, int]
"""Role, rank, incarnation."""

COLLECTIVES = re.compile(r"torch/distributed/|/deepspeed/comm/|/mpi4py/")
"""Frames in which a member waits for the other ranks of its group."""


@dataclass(slots=True)
class LastAnswer:
    """The last answer of a member.

    Attributes:
        silent_since: since when the member does not answer; None if it does.
        looks: what its agent sees of it from outside.
    """

    at: float
    progress: MemberProgress
    silent_since: float | None = None
    looks: str = ""


@dataclass(frozen=True, slots=True)
class Quiet:
    """A member without progress for ``for_s`` seconds, with its activity and the members it waits for."""

    key: Key
    for_s: float
    doing: str
    waits_for: tuple[str, ...] = ()
    silent: bool = False

    @property
    def name(self) -> str:
        return f"{self.key[0]}:{self.key[1]}"


@dataclass(frozen=True, slots=True)
class Hang:
    """Hanging members: ``causes`` hang by themselves, ``others`` because of them."""

    causes: tuple[Quiet, ...]
    others: tuple[Quiet, ...] = ()


@dataclass(slots=True)
class HealthState:
    """The persisted state of hang detection.

    Attributes:
        answers: last answer of each serving member.
        asked_at: when members were last asked.
        hang: the hang whose stacks are being taken, if any.
        stacks_by: when to stop waiting for the stacks.
    """

    answers: dict[Key, LastAnswer] = field(default_factory=dict)
    asked_at: float = 0.0
    hang: Hang | None = None
    stacks_by: float = 0.0


def quiet_for(progress: MemberProgress, since_s: float) -> tuple[float, str]:
    """Return the seconds without progress of a member that reported this ``since_s`` ago, and its activity; 0 if it
    is idle."""
    doing = [(f"in {call.method}() for {call.caller}", call.since_s) for call in progress.calls]
    if progress.run_s is not None:
        doing.append(("in run()", progress.run_s))
    if not doing:
        return 0.0, ""
    what, busy_s = max(doing, key=lambda item: item[1])
    return min(busy_s, progress.quiet_s) + since_s, what


def causes_of(quiet: Iterable[Quiet], moving: Collection[str]) -> Hang | None:
    """Find the causes among members that are quiet for too long; None if no member hangs.

    Args:
        quiet: members that are quiet for too long.
        moving: names of members that make progress; a member that waits for one of them does not hang.
    """
    hung = [member for member in quiet if not set(member.waits_for) & set(moving)]
    names = {member.name for member in hung}
    causes = [member for member in hung if not set(member.waits_for) & (names - {member.name})]
    causes = [member for member in causes if not member.waits_for or set(member.waits_for) & names]
    if not causes:
        causes = _in_circles(hung)
    if not causes:
        return None
    return Hang(tuple(causes), tuple(member for member in hung if member not in causes))


def _in_circles(hung: Iterable[Quiet]) -> list[Quiet]:
    """Return the members that wait for themselves through others, and for no member outside their circle."""
    members = list(hung)
    names = {member.name for member in members}
    ahead = {member.name: set(member.waits_for) & names for member in members}
    reached = {name: _reached(ahead, name) for name in names}
    return [m for m in members if m.name in reached[m.name] and all(m.name in reached[o] for o in reached[m.name])]


def _reached(ahead: Mapping[str, Collection[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = list(ahead[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += ahead[name]
    return found


def circle_text(causes: Collection[Quiet]) -> str:
    """Return ``A:0 → B:0 → A:0`` if members wait for each other in a circle; else an empty text."""
    of_name = {member.name: member for member in causes}
    first = next(iter(of_name), None)
    path: list[str] = []
    name = first
    while name is not None and name not in path:
        path.append(name)
        name = next((other for other in of_name[name].waits_for if other in of_name), None)
    if name is None:
        return ""
    return " → ".join([*path[path.index(name) :], name])


@dataclass(slots=True)
class DiagnosisManager:
    """Watches the progress of one job's members. ``limit_s``: maximum seconds without progress."""

    limit_s: float
    state: HealthState = field(default_factory=HealthState)

    @property
    def poll_s(self) -> float:
        return min(LONGEST_POLL_S, max(SHORTEST_POLL_S, self.limit_s / POLLS_PER_LIMIT))

    def due(self, now: float) -> bool:
        """True if members are to be asked again, once per interval."""
        if now - self.state.asked_at < self.poll_s:
            return False
        self.state.asked_at = now
        return True

    def answered(self, key: Key, progress: MemberProgress, now: float) -> None:
        self.state.answers[key] = LastAnswer(now, progress)

    def missed(self, key: Key, now: float, looks: str = "") -> None:
        """Record that a member did not answer in time; ``looks``: what its agent sees of it from outside."""
        answer = self.state.answers.setdefault(key, LastAnswer(now, MemberProgress(), now))
        answer.looks = looks
        if answer.silent_since is None:
            answer.silent_since = now

    def find_hang(self, living: Collection[Key], coming: Collection[str], now: float) -> Hang | None:
        """Return the hang among the serving members, if any; ``coming``: names of members that are being started."""
        self.state.answers = {key: answer for key, answer in self.state.answers.items() if key in living}
        quiet: list[Quiet] = []
        moving: list[Quiet] = []
        for key, answer in self.state.answers.items():
            for_s, doing = quiet_for(answer.progress, now - answer.at)
            # Its last answer named no activity: something that began afterwards keeps it from answering.
            if not doing and answer.silent_since is not None:
                for_s, doing = now - answer.silent_since, self._silent(key)
                doing += f" ({answer.looks})" if answer.looks else ""
            if doing:
                waits = tuple(name for name in answer.progress.waits if not name.startswith("@"))
                found = Quiet(key, for_s, doing, waits, answer.silent_since is not None)
                (quiet if for_s >= self.limit_s else moving).append(found)
        hang = causes_of(quiet, {*coming, *(member.name for member in moving)})
        if hang is None:
            return None
        names = {cause.name for cause in hang.causes}
        return Hang(hang.causes, (*hang.others, *(member for member in moving if names & set(member.waits_for))))

    def _silent(self, key: Key) -> str:
        """Return the activity of a silent member, as far as its callers tell."""
        name = f"{key[0]}:{key[1]}"
        callers = [
            f"{role}:{rank}" for (role, rank, _), answer in self.state.answers.items() if name in answer.progress.waits
        ]
        what = f"in a call for {', '.join(callers)}" if callers else "in something"
        return f"{what} that keeps it from answering"

    def forget(self) -> None:
        """Drop all answers, because the hang was handled."""
        self.state.answers.clear()


def narrowed(hang: Hang, stacks: Mapping[Key, MemberStack]) -> Hang:
    """Return the hang without the ranks that wait in a collective for another rank of their group."""
    inside = [c for c in hang.causes if _in_collective(stacks.get(c.key))]
    outside = tuple(c for c in hang.causes if c not in inside)
    of_roles = {c.key[0] for c in outside}
    waiting = tuple(c for c in inside if c.key[0] in of_roles)
    if not waiting:
        return hang
    return Hang(tuple(c for c in hang.causes if c not in waiting), (*hang.others, *waiting))


def _in_collective(stack: MemberStack | None) -> bool:
    return stack is not None and any(COLLECTIVES.search(frame) for frame in stack.frames)


def describe_hang(hang: Hang, stacks: Mapping[Key, MemberStack], limit_s: float, where: str, now: float) -> FailureInfo:
    """Return the failure of the first cause: the member, its activity, its stack, who waits for it, and where all
    stacks are."""
    first = hang.causes[0]
    stack = stacks.get(first.key)
    pid = f" (pid {stack.pid})" if stack is not None else ""
    lines = [
        f"{first.name}{pid} hangs: {first.doing}, without a report, a step's boundary or a call for "
        f"{first.for_s:.0f} s (limit {limit_s:g} s)"
    ]
    if stack is not None:
        used = f", {stack.cpu_s:.1f} s of processor time used"
        lines[0] += f"; its process {stack.state}{f' in {stack.wchan}' if stack.wchan else ''}{used}"
        lines += [f"  at {frame}" for frame in stack.frames] or ["  it did not answer with its stacks"]
    if circle := circle_text(hang.causes):
        lines.append(f"they wait for each other in a circle: {circle}")
    if len(hang.causes) > 1:
        lines.append("hanging too: " + ", ".join(f"{c.name} {c.doing}" for c in hang.causes[1:]))
    if hang.others:
        lines.append("waiting: " + ", ".join(f"{o.name} {o.doing}" for o in hang.others))
    lines.append(f"stacks of all members: {where}")
    return FailureInfo("\n".join(lines), first.key[0], first.key[1], now, kind="Hang")
