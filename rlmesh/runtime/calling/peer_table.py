"""What a caller knows of its peers: addresses, connections, deaths, how busy they are, what they do."""

from __future__ import annotations

import itertools
import os
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlmesh.runtime.calling.load_balance import Load, least_busy
from rlmesh.runtime.calling.peer_status import Waiting, lives, process_state, state_letter
from rlmesh.runtime.calling.pending import Peer, PendingCall, how_it_ended
from rlmesh.runtime.connections.address_book import AddressBook, split_name
from rlmesh.runtime.process import clock
from rlmesh.runtime.serving.activity_board import board_path, does_not_answer, look_at

if TYPE_CHECKING:
    from rlmesh.job.status import ExitInfo


class JobEnd(NamedTuple):
    """Why a job ends: in one line, and as the error of the whole job where there is one."""

    why: str
    error: BaseException | None = None


def _goes_on() -> JobEnd | None:
    return None


class Knowledge:
    """The tables that `Calls` keeps, and questions about them. From any thread."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._book: AddressBook | None = None
        self._peers: dict[str, Peer] = {}
        self._orphans: dict[str, Peer] = {}
        self._lost: dict[str, str] = {}
        """Endpoints whose connection was lost, and why."""
        self._dead: dict[tuple[str, int], ExitInfo] = {}
        """Members, by name and incarnation, of whose end an agent told."""
        self._turns = itertools.count()
        self.active_at = clock.now()
        """When this process last sent a call, got an answer, or gave another sign of life."""
        self.job_end: Callable[[], JobEnd | None] = _goes_on
        """Why the job is ending, or has ended: what a lost member is the effect of."""
        self.last_line_of: Callable[[str, int], str] | None = None
        """The last line of a member's log, by role and rank, where this process can read it."""

    @property
    def book(self) -> AddressBook | None:
        return self._book

    def least_busy(self, names: Sequence[str]) -> str:
        """The member that a call would wait for the shortest, as far as this process knows. From any thread."""
        with self._lock:
            known = [self._load(name) for name in names]
            chosen = least_busy([load for load, _ in known], next(self._turns))
            for index, (_, peer) in enumerate(known):
                if peer is not None and index != chosen:
                    peer.queued_ns //= 2
            return names[chosen]

    def _load(self, name: str) -> tuple[Load, Peer | None]:
        member = self._book.find_name(name) if self._book is not None else None
        if member is None or member.endpoint is None:
            return Load(True, False, 0, 0), None
        alive = (name, member.incarnation) not in self._dead and member.endpoint not in self._lost
        peer = self._peers.get(member.endpoint)
        return (Load(alive, True, 0, 0), None) if peer is None else (Load(alive, True, *peer.load()), peer)

    def is_gone(self, name: str, endpoint: str | None) -> bool:
        """Whether a member's process has ended; otherwise its lost connection is forgotten, so that the next call
        opens another."""
        member = self._book.find_name(name) if self._book is not None else None
        if member is not None and (name, member.incarnation) in self._dead:
            return True
        with self._lock:
            self._lost.pop(endpoint or (member.endpoint if member is not None else None) or "", None)
        return False

    def _is_ending(self, peer: Peer) -> bool:
        """Its process has closed its socket and is not gone, or was not at the last look: exit handlers and the
        interpreter's own end may take seconds, and only then can its agent tell how it ended."""
        member = self._book.find_name(peer.channel.peer_name) if self._book is not None else None
        scheme, _, path = peer.endpoint.partition("://")
        if member is None or member.endpoint != peer.endpoint or scheme not in ("unix", "ipc"):
            return False
        before, peer.ending = peer.ending, not os.path.exists(path) and lives(member.pid)
        return before or peer.ending

    def _calls_of(self, peer: Peer) -> list[PendingCall]:
        with self._lock:
            return [*peer.pending.values(), *peer.waiting]

    def is_alone(self, call: PendingCall) -> bool:
        """True if no other call to a member was sent and is not answered yet.

        Calls to the job's own processes (``@master``, ``@agent``) do not count: a service's question after changes of
        the job waits at the master for as long as nothing changes.
        """
        with self._lock:
            return all(
                other is call or other.name.startswith("@")
                for peer in self._peers.values()
                for other in peer.pending.values()
            )

    def waiting(self, call: PendingCall) -> Waiting:
        """Whom a call waits for, and what is known of it."""
        role, rank = split_name(call.name)
        last_line = ""
        if rank is not None and self.last_line_of is not None:
            last_line = self.last_line_of(role, rank)
        left_s = call.deadline - clock.now()
        return Waiting(call.name, call.method, call.age_s(), left_s, self._state_of(call), last_line)

    def _state_of(self, call: PendingCall) -> str:
        if call.passed is not None:
            return f"waits for an argument, from {call.passed.describe()}"
        member = self._book.find_name(call.name) if self._book is not None else None
        if member is not None and (exit_info := self._dead.get((call.name, member.incarnation))) is not None:
            return how_it_ended(exit_info).partition(";")[0]
        peer = call.peer
        if peer is None and call.cohort is not None:
            return "not every rank that the call goes to has an address in the same incarnation"
        if peer is None:
            return "its address is not known yet" if call.endpoint is None else "not sent yet"
        if peer.endpoint in self._lost or peer.endpoint in self._orphans:
            state = self._lost.get(peer.endpoint, "the connection was lost")
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
        """Why a member of this machine does not answer: it is stopped, or busy in something that keeps it from it."""
        member = self._book.find_name(call.name) if self._book is not None else None
        scheme, _, path = (call.peer.endpoint if call.peer is not None else "").partition("://")
        if member is None or scheme not in ("unix", "ipc"):
            return ""
        seen = look_at(board_path(os.path.dirname(path), call.name))
        return does_not_answer(state_letter(member.pid), member.pid, seen)

    def unanswered(self, call: PendingCall) -> str:
        """What is known at the deadline of a call that was sent."""
        why = self._why_silent(call)
        return "the member has not answered" + (f": it is {why}" if why.startswith(("stopped", "busy")) else "")
