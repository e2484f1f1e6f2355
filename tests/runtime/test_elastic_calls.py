"""Calls to an elastic role whose ranks restart, lag behind, are full, or lack an argument: all ranks begin, or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlmesh.errors import CallTimeout, MailboxFull, PeerLost, Restarting, StaleIncarnation
from rlmesh.job.status import ExitInfo
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh
from tests.settling import settle

pytestmark = pytest.mark.case("n01")


class Rank:
    def __init__(self) -> None:
        self.began: list[Any] = []
        self.release = threading.Event()
        self.fails: Exception | None = None

    @rpc
    def update(self, number: Any) -> Any:
        self.began.append(number)
        if self.fails is not None:
            raise self.fails
        return number

    @rpc
    def update_all(self, items: list[int]) -> list[int]:
        self.began.append(items)
        return items

    @rpc
    def items(self, number: int) -> Iterator[int]:
        self.began.append(number)
        yield number

    @rpc
    async def here(self) -> bool:
        return True

    @rpc
    def hold(self, number: int) -> int:
        self.began.append(number)
        assert self.release.wait(HANG_S)
        return number


class Role:
    """An elastic role of two ranks, A, whose generations the test starts and publishes one by one."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.of: dict[tuple[int, int], Rank] = {}
        self.at: dict[tuple[int, int], str | None] = {}
        self.version = 0
        self.group: RoleGroup[Any] = RoleGroup("A", runtime=mesh.caller)

    def start(self, generation: int, *, served_as: int | None = None) -> None:
        for rank in range(2):
            runtime = self.mesh.start(f"A:{rank}")
            self.of[rank, generation] = served = Rank()
            number = generation if served_as is None or rank == 0 else served_as
            runtime.serve(f"A:{rank}", served, incarnation=number)
            self.at[rank, generation] = runtime.endpoint

    def publish(self, *known: tuple[int, str | None]) -> None:
        """The book says: these generations of rank 0 and 1, at these addresses."""
        self.version += 1
        members = [MemberAddress("A", rank, generation, at) for rank, (generation, at) in enumerate(known)]
        others = tuple(member for member in self.mesh.addresses if member.role != "A")
        book = AddressBook(1000 + self.version, (*others, *members), elastic=("A",))
        self.mesh.caller.set_address_book(book)
        settle(*self.mesh.runtimes)

    def serves(self, generation: int) -> None:
        self.publish((generation, self.at[0, generation]), (generation, self.at[1, generation]))

    def died(self, rank: int, generation: int, *, served: bool = True) -> None:
        self.mesh.caller.member_lost(ExitInfo("A", rank, generation, 1, None, 9, time.time(), served=served))
        settle(*self.mesh.runtimes)

    def began(self, generation: int) -> list[list[Any]]:
        return [self.of[rank, generation].began for rank in range(2)]


@pytest.fixture
def role(mesh: Mesh) -> Role:
    made = Role(mesh)
    made.start(0)
    return made


def every_way(role: Role) -> list[Any]:
    """What waits for its answer, of a call in every way that there is; each begins with another number."""
    group = role.group.options(timeout_s=HANG_S)
    stream = group.stream("items", 5)
    group.notify("update", 6)
    return [
        group.call("update", 1),
        group[0:2].call("update", 2),
        group.call("update", [3, 3], _scatter=True),
        group.call_batch("update_all", 4, [1, 2, 3, 4]),
        stream,
        group.options(idempotent=True).call("update", 7),
        group.options(return_exceptions=True).call("update", 8),
    ]


def test_no_rank_begins_before_all_have_an_address(role: Role, until: Callable[..., None]) -> None:
    role.publish((0, role.at[0, 0]), (0, None))
    waiting = every_way(role)
    assert "not every rank" in waiting[0].waiting_for()
    time.sleep(0.1)
    assert role.began(0) == [[], []]
    role.serves(0)
    stream = waiting.pop(4)
    assert list(stream) == [5, 5]
    results = [future.result(HANG_S) for future in waiting]
    assert results == [[1, 1], [2, 2], [3, 3], [1, 2, 3, 4], [7, 7], [8, 8]]
    numbers = [1, 2, 3, 5, 6, 7, 8]
    for rank, share in enumerate(([1, 2], [3, 4])):
        began = role.of[rank, 0].began
        until(lambda began=began: len(began) == 8)
        assert sorted(number for number in began if number != share) == numbers and share in began


def test_a_book_that_is_between_its_ranks_is_waited_out(role: Role, until: Callable[..., None]) -> None:
    role.start(1)
    role.publish((1, role.at[0, 1]), (0, role.at[1, 0]))
    future = role.group.call("update", 1)
    time.sleep(0.1)
    assert role.began(0) == role.began(1) == [[], []]
    role.serves(1)
    assert future.result(HANG_S) == [1, 1]
    assert role.began(0) == [[], []] and role.began(1) == [[1], [1]]


def test_a_lost_connection_of_one_rank_holds_all_back(role: Role, until: Callable[..., None]) -> None:
    role.serves(0)
    assert role.group.call("update", 0).result(HANG_S) == [0, 0]
    role.start(1)
    dead = next(runtime for runtime in role.mesh.runtimes if runtime.endpoint == role.at[1, 0])
    role.mesh.runtimes.remove(dead)
    dead.close()
    until(lambda: bool(role.mesh.caller.outbound.peers.lost))
    waiting = every_way(role)
    role.publish((1, None), (1, None))
    role.died(1, 0)
    role.publish((1, role.at[0, 1]), (1, None))
    time.sleep(0.05)
    assert role.began(0) == [[0], [0]], "nothing went to the rank that still lives"
    role.serves(1)
    stream = waiting.pop(4)
    assert list(stream) == [5, 5]
    assert [future.result(HANG_S) for future in waiting][:3] == [[1, 1], [2, 2], [3, 3]]
    until(lambda: [len(began) for began in role.began(1)] == [8, 8])
    assert role.began(0) == [[0], [0]]


def test_a_rank_of_another_generation_fails_the_call_for_all(role: Role, until: Callable[..., None]) -> None:
    """The processes at the addresses are not those that the address book means."""
    role.start(1, served_as=2)
    role.serves(1)
    group = role.group.options(timeout_s=HANG_S)
    blocked = group[0].call("hold", 0)
    until(lambda: role.of[0, 1].began == [0])
    with pytest.raises(StaleIncarnation, match="incarnation 2") as caught:
        group.call("update", 1).result()
    assert caught.value.executed == "maybe", "rank 0 may have begun"
    results = group.options(return_exceptions=True).call("update", 2).result()
    assert [type(result) for result in results] == [StaleIncarnation] * 2
    group[0].call("here").result()  # It arrives behind what withdraws the parts.
    role.of[0, 1].release.set()
    assert blocked.result(HANG_S) == 0
    assert group[0].call("update", 3).result() == 3
    assert role.began(1) == [[0, 3], []], "what still waited at rank 0 was withdrawn"


def test_a_dead_rank_that_nobody_replaces_fails_the_call_before_any_begins(role: Role) -> None:
    role.serves(0)
    role.died(1, 0)
    for future in (role.group.call("update", 1), role.group.options(idempotent=True).call("update", 1)):
        with pytest.raises(PeerLost) as caught:
            future.result(HANG_S)
        assert (caught.value.rank, caught.value.executed) == (1, "no")
    assert role.began(0) == [[], []]


def test_without_queueing_a_restart_is_an_error_for_all(role: Role) -> None:
    role.start(1)
    role.publish((1, role.at[0, 1]), (1, None))
    results = role.group.options(queue=False, return_exceptions=True).call("update", 1).result(HANG_S)
    assert [type(result) for result in results] == [Restarting, Restarting]
    assert {result.executed for result in results} == {"no"}
    role.serves(1)
    assert role.group.call("update", 2).result(HANG_S) == [2, 2]
    assert role.began(1) == [[2], [2]]


def test_a_deadline_passes_for_all(role: Role) -> None:
    role.publish((0, role.at[0, 0]), (0, None))
    results = role.group.options(timeout_s=0.1, return_exceptions=True).call("update", 1).result(HANG_S)
    assert [(type(result), result.executed) for result in results] == [(CallTimeout, "no")] * 2
    role.serves(0)
    assert role.group.call("update", 2).result(HANG_S) == [2, 2] and role.began(0) == [[2], [2]]


def test_a_cancelled_call_that_waits_begins_nowhere(role: Role) -> None:
    role.publish((0, role.at[0, 0]), (0, None))
    assert role.group.call("update", 1).cancel()
    assert role.group.call_batch("update_all", 2, [1, 2]).cancel()
    role.serves(0)
    assert role.group.call("update", 2).result(HANG_S) == [2, 2] and role.began(0) == [[2], [2]]
    assert role.mesh.caller.activity.pending() == []


def fill(role: Role, rank: int, until: Callable[..., None]) -> list[Any]:
    held = [role.group[rank].call("hold", number) for number in range(3)]
    until(lambda: role.of[rank, 0].began == [0])
    return held


def test_a_full_window_of_one_rank_holds_all_back(
    role: Role, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "WINDOW", 3)
    role.serves(0)
    held = fill(role, 1, until)
    results = role.group.options(queue=False, return_exceptions=True).call("update", 1).result(HANG_S)
    assert [(type(result), result.executed) for result in results] == [(MailboxFull, "no")] * 2
    waiting = [role.group.call("update", number) for number in (2, 3)]
    behind = role.group[0].call("update", 4)
    late = role.group.options(timeout_s=0.1, return_exceptions=True).call("update", 5).result(HANG_S)
    assert [type(result) for result in late] == [CallTimeout] * 2
    assert role.of[0, 0].began == []
    role.of[1, 0].release.set()
    assert [future.result(HANG_S) for future in [*held, *waiting, behind]] == [0, 1, 2, [2, 2], [3, 3], 4]
    assert role.began(0) == [[2, 3, 4], [0, 1, 2, 2, 3]], "in the order in which they were called"


def test_a_call_that_waits_for_room_goes_to_the_next_generation_as_a_whole(
    role: Role, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "WINDOW", 3)
    role.serves(0)
    held = fill(role, 1, until)
    waiting = role.group.call("update", 1)
    role.start(1)
    role.publish((1, None), (1, None))
    role.died(1, 0)
    assert all(isinstance(future.exception(HANG_S), PeerLost) for future in held)
    role.serves(1)
    assert waiting.result(HANG_S) == [1, 1]
    role.of[1, 0].release.set()
    assert role.of[0, 0].began == [] and role.began(1) == [[1], [1]]


def test_thousands_that_wait_for_room_go_on_in_their_order(
    role: Role, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(peer_connections, "WINDOW", 4)
    role.serves(0)
    made: list[Any] = []

    def make() -> None:
        made.extend(role.group.call("update", number) for number in range(2000))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(HANG_S)
    assert [future.result(HANG_S) for future in made] == [[number, number] for number in range(2000)]
    assert role.began(0) == [list(range(2000))] * 2


class Maker:
    def __init__(self) -> None:
        self.release = threading.Event()

    @rpc
    def make(self, number: int, fail: bool = False) -> int:
        assert self.release.wait(HANG_S)
        if fail:
            raise ValueError("no number")
        return number


@pytest.mark.parametrize("fail", [False, True])
def test_no_rank_begins_before_all_have_their_arguments(mesh: Mesh, fail: bool) -> None:
    makers = [Maker(), Maker()]
    helper = mesh.serve("H", *makers)
    role = Role(mesh)
    role.start(0)
    role.serves(0)
    assert role.group.call("update", 0).result(HANG_S) == [0, 0]
    numbers = [helper[0].call("make", 1), helper[1].call("make", 2, fail=fail)]
    together = role.group.call("update", numbers, _scatter=True)
    behind = role.group.call("update", 3)
    alone = role.group[0].call("update", 4)
    makers[0].release.set()
    assert numbers[0].result(HANG_S) == 1
    time.sleep(0.05)
    assert role.began(0) == [[0], [0]]
    makers[1].release.set()
    if fail:
        with pytest.raises(ValueError, match="no number"):
            together.result(HANG_S)
    else:
        assert together.result(HANG_S) == [1, 2]
    assert behind.result(HANG_S) == [3, 3] and alone.result(HANG_S) == 4
    first = [] if fail else [1]
    assert role.began(0) == [[0, *first, 3, 4], [0, *([] if fail else [2]), 3]], "none is overtaken"


def test_an_idempotent_call_is_made_again_by_all_ranks_of_the_next_generation(
    role: Role, until: Callable[..., None]
) -> None:
    role.serves(0)
    future = role.group.options(idempotent=True, timeout_s=HANG_S).call("hold", 1)
    until(lambda: role.began(0) == [[1], [1]])
    role.of[0, 0].release.set()  # Rank 0 answers; rank 1 dies over it.
    role.start(1)
    for rank in range(2):
        role.of[rank, 1].release.set()
    role.publish((1, None), (1, None))
    role.died(1, 0)
    time.sleep(0.1)
    assert not future.done(), "what rank 0 answered is no result of the whole"
    role.serves(1)
    assert future.result(HANG_S) == [1, 1]
    role.of[1, 0].release.set()
    assert role.began(0) == [[1], [1]] and role.began(1) == [[1], [1]]


def test_an_idempotent_call_is_not_made_again_by_the_same_generation(
    role: Role, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """The connection to one rank breaks and nobody dies: the other one may be in the middle of the first attempt."""
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)
    role.serves(0)
    future = role.group.options(idempotent=True, timeout_s=HANG_S).call("hold", 1)
    until(lambda: role.began(0) == [[1], [1]])
    server = next(runtime for runtime in role.mesh.runtimes if runtime.endpoint == role.at[1, 0])

    def cut() -> None:
        for link in list(server.inbound.channels):
            link.close()
            server.inbound.on_lost(link, "cut")

    server.post(cut)
    with pytest.raises(PeerLost):
        future.result(HANG_S)
    for rank in range(2):
        role.of[rank, 0].release.set()
    assert role.began(0) == [[1], [1]]


def test_what_a_method_raises_is_an_answer_and_not_made_again(role: Role) -> None:
    role.serves(0)
    role.of[1, 0].fails = ValueError("mine")
    outcomes = role.group.options(idempotent=True, return_exceptions=True).call("update", 1).result(HANG_S)
    assert outcomes[0] == 1 and isinstance(outcomes[1], ValueError)
    assert role.began(0) == [[1], [1]]


def test_simple_roles_go_member_by_member(mesh: Mesh) -> None:
    members = [Rank(), Rank()]
    group = mesh.serve("S", *members)
    members[1].fails = ValueError("mine")
    outcomes = group.options(return_exceptions=True).call("update", 1).result(HANG_S)
    assert outcomes[0] == 1 and isinstance(outcomes[1], ValueError)
    book = AddressBook(1000, (mesh.addresses[0], MemberAddress("S", 1, 1, None)))
    mesh.caller.set_address_book(book)
    settle(*mesh.runtimes)
    waiting = group.call("update", 2)
    assert group[0].call("update", 3).result(HANG_S) == 3
    assert members[0].began == [1, 2, 3] and not waiting.done()
    waiting.cancel()


def test_a_handle_to_an_incarnation_meets_no_other(role: Role) -> None:
    from rlmesh.runtime.handle import MemberHandle

    role.serves(0)
    handles = [MemberHandle[Any](role.mesh.caller.outbound, "A:0", incarnation=number) for number in range(3)]
    assert handles[0].call("update", 1).result(HANG_S) == 1
    soon = handles[1].call("update", 2)
    role.start(1)
    role.serves(1)
    assert soon.result(HANG_S) == 2
    with pytest.raises(StaleIncarnation, match="meant for incarnation 0") as caught:
        handles[0].call("update", 3).result(HANG_S)
    assert caught.value.executed == "no"
    assert isinstance(handles[2].options(timeout_s=0.1).call("update", 4).exception(HANG_S), CallTimeout)


def test_ranks_that_are_called_one_by_one_are_not_torn_either(role: Role, until: Callable[..., None]) -> None:
    role.serves(0)
    group = role.group.options(timeout_s=HANG_S)
    assert [rank.call("update", 0).result() for rank in group] == [0, 0]
    role.start(1)
    sent = group[0].call("hold", 1)
    until(lambda: role.of[0, 0].began == [0, 1])
    role.publish((1, None), (1, None))
    alone = group[1].call("hold", 1)
    with pytest.raises(StaleIncarnation, match=r"A:1.hold\(\) was not sent: its group restarted") as caught:
        alone.result()
    assert caught.value.executed == "no"
    role.died(0, 0)
    assert isinstance(sent.exception(HANG_S), PeerLost)
    again = [rank.call("update", 3) for rank in group]
    role.serves(1)
    assert [future.result() for future in again] == [3, 3], "all of them once more begin a new round"
    assert role.began(1) == [[3], [3]]
    role.of[0, 0].release.set()


def test_a_loop_that_meets_a_restart_after_its_first_call_failed_is_not_torn(
    role: Role, until: Callable[..., None]
) -> None:
    role.serves(0)
    group = role.group[:2].options(timeout_s=HANG_S)
    sent = group[0].call("hold", 1)
    until(lambda: role.of[0, 0].began == [1])
    role.start(1)
    role.publish((1, None), (1, None))
    role.died(0, 0)
    assert isinstance(sent.exception(HANG_S), PeerLost)
    assert isinstance(group[1].call("hold", 1).exception(HANG_S), StaleIncarnation)
    role.of[0, 0].release.set()


def test_a_rank_that_answered_does_not_hold_the_others_back(role: Role) -> None:
    role.serves(0)
    assert role.group[0].call("update", 1).result(HANG_S) == 1
    role.start(1)
    role.serves(1)
    assert role.group[1].call("update", 2).result(HANG_S) == 2
    assert role.group.call_rank0("update", 3).result(HANG_S) == 3
