"""A caller's knowledge of its peers: addresses, connections, deaths, load, and state."""

from __future__ import annotations

import itertools
import os
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlmesh.errors import Executed, PeerLost, Restarting, RoleNotFound, StaleIncarnation
from rlmesh.runtime.calling.peer_status import Waiting, lives, process_state, state_letter
from rlmesh.runtime.calling.pending import Peer, PendingCall, how_it_ended
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress, MemberExit, split_name
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.activity_board import board_path, does_not_answer, look_at
from rlmesh.runtime.transport.base import Link
from rlmesh.wire.envelope import ANY_INCARNATION

_SAME_NS = 1_000_000
"""Queueing times that differ by less count as equal."""


class JobEnd(NamedTuple):
    """The reason why a job ends: in one line, and as the error of the whole job where there is one."""

    why: str
    error: BaseException | None = None


class Load(NamedTuple):
    """The load of a member, as far as one caller knows.

    ``queued_ns`` is how long the member's last answered call had waited for other calls there, whoever made them. It
    is halved each time the member is passed over, so that an old value does not count for ever.
    """

    alive: bool
    reachable: bool
    in_flight: int
    queued_ns: int


def least_busy(loads: Sequence[Load], turn: int) -> int:
    """Index of the member to call: alive, with a known address, fewest calls of this caller in flight, then the
    shortest queue; equal members take turns.

    Args:
        loads: at least one.
        turn: a number that grows with each call.
    """
    ranks = [(not load.alive, not load.reachable, load.in_flight, load.queued_ns // _SAME_NS) for load in loads]
    best = min(ranks)
    equal = [index for index, rank in enumerate(ranks) if rank == best]
    return equal[turn % len(equal)]


class PeerTable:
    """The peers of one runtime. Questions may be asked from any thread; `Calls` changes the table.

    Attributes:
        lock: guards the table and the pending calls of all peers.
        book: the newest address book.
        by_endpoint: the connections that calls take.
        by_link: the same connections by their links.
        orphans: lost connections whose calls still wait for the agent's word on the member's end.
        lost: endpoints whose connection was lost, and why.
        dead: ended members, by name and incarnation, as their agents reported them.
        job_end: returns why the job is ending or has ended, else nothing. In a job that ends, lost members are an
            effect and not a cause.
        last_line_of: gives the last line of a member's log, by role and rank, where this process can read it.
    """

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.book: AddressBook | None = None
        self.by_endpoint: dict[str, Peer] = {}
        self.by_link: dict[Link, Peer] = {}
        self.orphans: dict[str, Peer] = {}
        self.lost: dict[str, str] = {}
        self.dead: dict[tuple[str, int], MemberExit] = {}
        self.job_end: Callable[[], JobEnd | None] = lambda: None
        self.last_line_of: Callable[[str, int], str] | None = None
        self._turns = itertools.count()

    # Addresses.

    def endpoint_of(self, call: PendingCall) -> str | None:
        """The address that a call goes to; None as long as it is not known.

        Raises:
            RoleNotFound: the role has no such rank.
            CallError: the member is gone, of another incarnation, or being restarted.
        """
        if call.pinned:
            return call.endpoint
        role, rank = split_name(call.name)
        if self.book is None or rank is None:
            return None
        member = self.book.find(role, rank)
        if member is None:
            group = self.book.role(role)
            raise RoleNotFound(f"{role} has {len(group)} members; there is no {call.name}")
        if call.wanted not in (ANY_INCARNATION, member.incarnation):
            if member.incarnation < call.wanted:
                return None
            text = f"{call.name}.{call.method}() was meant for incarnation {call.wanted}; it was restarted since"
            raise call.error(StaleIncarnation, text, "no")
        self._check_rank_loop(call, member.incarnation)
        exit_info = self.dead.get((call.name, member.incarnation))
        if exit_info is not None:
            raise self.lost_error(call, how_it_ended(exit_info), "no")
        call.incarnation = member.incarnation
        if member.endpoint is None and member.incarnation and not call.queue:
            text = f"{call.name} is being restarted and options(queue=False) was asked for"
            raise call.error(Restarting, text, "no")
        return member.endpoint

    def _find(self, name: str) -> MemberAddress | None:
        return self.book.by_name.get(name) if self.book is not None else None

    # Groups that restart together.

    def go_together(self, role: str) -> bool:
        """True if calls to ranks of this role are parts of one; also as long as nothing is known of the role."""
        return self.book is None or self.book.is_elastic(role)

    def generation(self, role: str) -> int:
        """The newest known generation of an elastic role; -1 if none is known."""
        found = self.book.role(role) if self.book is not None and role in self.book.roles() else ()
        return max((member.incarnation for member in found), default=-1)

    def left_behind(self, call: PendingCall, generation: int) -> PendingCall | None:
        """An earlier call of the same `RankLoop` that went to an older generation; None if there is none."""
        if call.rank_loop is None or self.book is None or not self.book.is_elastic(split_name(call.name)[0]):
            return None
        return call.rank_loop.left_behind(call, generation)

    def _check_rank_loop(self, call: PendingCall, generation: int) -> None:
        """Refuse a call that would run alone in its generation.

        Raises:
            StaleIncarnation: another call of the loop went to an older generation.
        """
        other = self.left_behind(call, generation)
        if other is not None:
            text = (
                f"{call.name}.{call.method}() was not sent: its group restarted (incarnation {generation}) since "
                f"{other.name}.{other.method}() was called (incarnation {other.incarnation}). Ranks that are called "
                "one by one would not run the same calls: call the group as a whole, or all ranks again"
            )
            raise call.error(StaleIncarnation, text, "no")

    # Load and life.

    def least_busy(self, names: Sequence[str]) -> str:
        """The member whose answer would come first, as far as this process knows."""
        with self.lock:
            known = [self._load(name) for name in names]
            chosen = least_busy([load for load, _ in known], next(self._turns))
            for index, (_, peer) in enumerate(known):
                if peer is not None and index != chosen:
                    peer.queued_ns //= 2
            return names[chosen]

    def _load(self, name: str) -> tuple[Load, Peer | None]:
        member = self._find(name)
        if member is None or member.endpoint is None:
            return Load(True, False, 0, 0), None
        alive = (name, member.incarnation) not in self.dead and member.endpoint not in self.lost
        peer = self.by_endpoint.get(member.endpoint)
        return (Load(alive, True, 0, 0), None) if peer is None else (Load(alive, True, *peer.load()), peer)

    def is_alone(self, call: PendingCall) -> bool:
        """True if no other call to a member was sent and not answered.

        Calls to the job's own processes (``@master``, ``@agent``) do not count: a service's request for changes of the
        job waits at the master for as long as nothing changes.
        """
        with self.lock:
            return all(
                other is call or other.name.startswith("@")
                for peer in self.by_endpoint.values()
                for other in peer.pending.values()
            )

    def calls_of(self, peer: Peer) -> list[PendingCall]:
        with self.lock:
            return [*peer.pending.values(), *peer.waiting]

    def is_gone(self, name: str, endpoint: str | None) -> bool:
        """True if a member's process has ended. Otherwise the loss of its connection is forgotten, so that the next
        call opens another one."""
        member = self._find(name)
        if member is not None and (name, member.incarnation) in self.dead:
            return True
        with self.lock:
            self.lost.pop(endpoint or (member.endpoint if member is not None else None) or "", None)
        return False

    def is_ending(self, peer: Peer) -> bool:
        """True if the peer has closed its socket, but its process was alive at this check or at the one before.

        Exit handlers and the interpreter's own end may take seconds; only then can the agent tell how the process
        ended.
        """
        member = self._find(peer.channel.peer_name)
        scheme, _, path = peer.endpoint.partition("://")
        if member is None or member.endpoint != peer.endpoint or scheme not in ("unix", "ipc"):
            return False
        before, peer.ending = peer.ending, not os.path.exists(path) and lives(member.pid)
        return before or peer.ending

    # Descriptions for people.

    def lost_error(self, call: PendingCall, reason: str, executed: Executed) -> PeerLost:
        """The error of a call whose callee is gone."""
        end = self.job_end()
        reason = end.why if end is not None else reason
        text = f"{call.name} cannot answer {call.method}(): {reason} [asked {call.describe()}]"
        error = call.error(PeerLost, text, executed)
        assert isinstance(error, PeerLost)
        error.reason = reason
        error.__cause__ = end.error if end is not None else None
        return error

    def waiting(self, call: PendingCall) -> Waiting:
        """The member that a call waits for, and what is known of that member."""
        role, rank = split_name(call.name)
        last_line = ""
        if rank is not None and self.last_line_of is not None:
            last_line = self.last_line_of(role, rank)
        left_s = call.deadline - clock.now()
        return Waiting(call.name, call.method, call.age_s(), left_s, self._state_of(call), last_line)

    def unanswered(self, call: PendingCall) -> str:
        """The state of the callee at the deadline of a call that was sent."""
        why = self._why_silent(call)
        return "the member has not answered" + (f": it is {why}" if why.startswith(("stopped", "busy")) else "")

    def _state_of(self, call: PendingCall) -> str:
        if call.passed is not None:
            return f"waits for an argument, from {call.passed.describe()}"
        member = self._find(call.name)
        if member is not None and (exit_info := self.dead.get((call.name, member.incarnation))) is not None:
            return how_it_ended(exit_info).partition(";")[0]
        peer = call.peer
        if peer is None and call.cohort is not None:
            return "not every rank that the call goes to has an address in the same incarnation"
        if peer is None:
            return "its address is not known yet" if call.endpoint is None else "not sent yet"
        if peer.endpoint in self.lost or peer.endpoint in self.orphans:
            state = self.lost.get(peer.endpoint, "the connection was lost")
        elif not peer.channel.authenticated:
            state = "not connected yet"
        elif call.call_id in peer.pending:
            state = "connected"
        else:
            state = f"connected; {len(peer.pending)} other calls to it are on their way"
        if member is None or not peer.endpoint.startswith(("unix:", "ipc:")):
            return state
        why = self._why_silent(call)
        known = [state, process_state(member.pid), "" if why.startswith("stopped") else why]
        return "; ".join(filter(None, known))

    def _why_silent(self, call: PendingCall) -> str:
        """The reason why a member of this machine does not answer: its process is stopped, or busy."""
        member = self._find(call.name)
        scheme, _, path = (call.peer.endpoint if call.peer is not None else "").partition("://")
        if member is None or scheme not in ("unix", "ipc"):
            return ""
        seen = look_at(board_path(os.path.dirname(path), call.name))
        return does_not_answer(state_letter(member.pid), member.pid, seen)
