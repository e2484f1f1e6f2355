"""A table of device leases, for roles that take turns. No I/O; the agent of each node has one.

Two roles never hold the same device at once; members of one role may, since they were given shares of it for that.
Turns are granted in the order of requests. The members of an elastic role on a node have their turn together: each of
them must be awake for any of them to proceed, so none may wait behind a role that waits for another of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

MemberKey: TypeAlias = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """The answer to a member's lease request; ``why`` names the holders if it was not granted."""

    granted: bool
    devices: tuple[str, ...] = ()
    waited_s: float = 0.0
    why: str = ""


@dataclass(slots=True)
class _Turn:
    """One use of devices by a member, or by the members of an elastic role on this node.

    ``left`` are the members that have not returned their devices, whether they have requested them or not.
    """

    role: str
    devices: dict[MemberKey, tuple[str, ...]]
    asked_at: float
    asked: set[MemberKey] = field(default_factory=set)
    left: set[MemberKey] = field(default_factory=set)
    granted_at: float | None = None

    def needs(self) -> set[str]:
        return {device for key in self.left for device in self.devices[key]}


class Acquisition:
    """The order in which a member asks the nodes of its group: by node number, each after the one before has granted.

    All groups use this order and hold their grants while they wait, so the group that has come furthest never waits
    for one that waits for it: the usual order of locks.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        self._left = sorted(set(nodes), reverse=True)
        self.asked: list[int] = []

    def next(self) -> int | None:
        """The next node to ask; None if all have granted."""
        if not self._left:
            return None
        self.asked.append(self._left.pop())
        return self.asked[-1]


class LeaseTable:
    """The turns of one node, oldest first. Each method returns the members that it has granted their devices.

    Members of a group that are on other nodes ask here too, without devices. They share their group's turn. As soon as
    the members of this node have returned their devices, other roles may have these, even if members on other nodes
    still hold theirs.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def ask(self, key: MemberKey, together: Mapping[MemberKey, Sequence[str]], now: float) -> list[MemberKey]:
        """Request a member's devices.

        Args:
            key: the member.
            together: the members that share its turn, including itself, and the devices of each.
        """
        held = self._of(key, lambda turn: key in turn.asked)
        if held is not None:
            return [key] if held.granted_at is not None else []
        turn = self._of(key, lambda turn: True)
        if turn is None:
            devices = {member: tuple(uuids) for member, uuids in together.items()}
            turn = _Turn(key[0], devices, now, left=set(devices))
            self._turns.append(turn)
        for member in turn.left:  # members of other nodes may have asked before this node's own members were started
            turn.devices[member] = turn.devices[member] or tuple(together.get(member, ()))
        turn.asked.add(key)
        if turn.granted_at is not None:
            return [key]
        return self._advance(now)

    def give_back(self, key: MemberKey, now: float) -> list[MemberKey]:
        """Return a member's devices, or withdraw its request."""
        turn = self._of(key, lambda turn: key in turn.asked)
        if turn is None:
            return []
        turn.asked.discard(key)
        if turn.granted_at is not None:
            turn.left.discard(key)
        elif not turn.asked:
            self._turns.remove(turn)
        return self._advance(now)

    def gone(self, key: MemberKey, now: float) -> list[MemberKey]:
        """Release everything of a member whose process has ended. The rest of its group ends too or is restarted: this
        node gets no report of the members of other nodes."""
        for turn in self._turns:
            leaving = {key} | {other for other in turn.left if not turn.devices[other]} if key in turn.left else set()
            turn.asked -= leaving
            turn.left -= leaving
        return self._advance(now)

    def why_not(self, key: MemberKey, now: float) -> str:
        """The members before this one and since when, for people."""
        own = self._of(key, lambda turn: key in turn.asked)
        said = []
        for turn in self._turns:
            if turn is own:
                break
            if own is None or not turn.needs() & own.needs() or turn.role == own.role:
                continue
            for member in sorted(turn.left):
                who = f"{member[0]}:{member[1]}"
                if turn.granted_at is None:
                    said.append(f"{who} has waited before it for {now - turn.asked_at:.1f} s")
                elif member in turn.asked:
                    what = ", ".join(turn.devices[member]) or "its turn"
                    said.append(f"{who} has had {what} for {now - turn.granted_at:.1f} s")
                else:
                    said.append(f"it is the turn of {turn.role}, and {who} has not come for it")
        return "; ".join(said) or "nobody is before it"

    def _of(self, key: MemberKey, wanted: Callable[[_Turn], bool]) -> _Turn | None:
        return next((turn for turn in self._turns if key in turn.left and wanted(turn)), None)

    def _advance(self, now: float) -> list[MemberKey]:
        """Grant every turn whose devices no other role holds or waits for before it."""
        self._turns = [turn for turn in self._turns if turn.left and (turn.asked or turn.granted_at is not None)]
        got: list[MemberKey] = []
        before: list[_Turn] = []
        for turn in self._turns:
            blocked = any(other.role != turn.role and other.needs() & turn.needs() for other in before)
            if turn.granted_at is None and not blocked:
                turn.granted_at = now
                got += sorted(turn.asked)
            before.append(turn)
        return got
