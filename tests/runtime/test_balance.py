"""``call_any``: the least busy member."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlmesh.errors import MailboxFull, UsageError
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.calling.peer_table import Load, least_busy
from rlmesh.runtime.rpc import rpc
from tests.runtime.conftest import Mesh

FREE = Load(True, True, 0, 0)


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([FREE._replace(in_flight=2), FREE._replace(in_flight=1)], 1),
        ([FREE._replace(queued_ns=50_000_000), FREE], 1),
        ([FREE._replace(alive=False), FREE._replace(in_flight=90)], 1),
        ([FREE._replace(reachable=False), FREE._replace(in_flight=90)], 1),
        ([FREE._replace(queued_ns=10), FREE], 0),
    ],
    ids=["calls on their way", "queue of others", "dead", "no address", "noise does not count"],
)
def test_the_least_busy_member_is_chosen(loads: list[Load], chosen: int) -> None:
    assert least_busy(loads, 0) == chosen


def test_equals_take_turns() -> None:
    assert [least_busy([FREE, FREE, FREE], turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


class Member:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.release = threading.Event()
        self.started = threading.Event()

    @rpc
    def rank_of(self) -> int:
        return self.rank

    @rpc
    def wait(self) -> int:
        self.started.set()
        self.release.wait(20)
        return self.rank


def test_call_any_avoids_members_with_calls_on_their_way(mesh: Mesh, until: Callable[..., None]) -> None:
    members = [Member(rank) for rank in range(3)]
    group = mesh.serve("A", *members)
    assert group.call(Member.rank_of).result() == [0, 1, 2]  # Connects.
    waiting = [group.call_any("wait"), group.call_any("wait")]
    until(lambda: sum(member.started.is_set() for member in members) == 2)
    busy = {member.rank for member in members if member.started.is_set()}
    free = ({0, 1, 2} - busy).pop()
    assert [group.call_any(Member.rank_of).result() for _ in range(5)] == [free] * 5
    for member in members:
        member.release.set()
    assert {future.result() for future in waiting} == busy


def test_call_any_spreads_over_idle_members(mesh: Mesh) -> None:
    group = mesh.serve("A", *[Member(rank) for rank in range(4)])
    futures = [group.call_any(Member.rank_of) for _ in range(40)]
    answers = [future.result() for future in futures]
    assert set(answers) == {0, 1, 2, 3}
    assert group[2:].call_any(Member.rank_of).result() in (2, 3)


def test_without_queueing_a_full_window_is_an_error(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "WINDOW", 4)
    member = Member(0)
    handle: Any = mesh.serve("A", member)[0]
    handle.call("rank_of").result()
    hasty = handle.options(queue=False)
    running = [hasty.call("wait") for _ in range(4)]
    with pytest.raises(MailboxFull, match="4 calls to A:0 are on their way") as caught:
        hasty.call("wait").result()
    assert caught.value.executed == "no"
    patient = handle.call("rank_of")
    member.release.set()
    assert [future.result() for future in running] == [0] * 4 and patient.result() == 0
    with pytest.raises(UsageError, match="above 0"):
        handle.options(timeout_s=-1)
