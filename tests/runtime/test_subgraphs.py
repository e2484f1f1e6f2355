"""Sub-graphs: who belongs to which, and that a straggler in one does not stall another."""

from __future__ import annotations

import threading

import pytest

from rlmesh.errors import UsageError
from rlmesh.runtime.axes import Axes
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.subgraphs import Mesh as JobMesh
from rlmesh.runtime.subgraphs import Subgraph
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh
from tests.runtime.conftest import _until as until


class Gate:
    """Holds the calls of one rank until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()


class Stage:
    def __init__(self, name: str, rank: int, gate: Gate | None, seen: list[tuple[str, int, int]]) -> None:
        self.name, self.rank, self.gate, self.seen = name, rank, gate, seen

    @rpc
    def work(self, items: list[int]) -> list[int]:
        if self.gate is not None:
            assert self.gate.open.wait(HANG_S)
        self.seen += [(self.name, self.rank, item) for item in items]
        return [item + 1 for item in items]


def declare(mesh: Mesh, *axes: tuple[str, dict[str, int]]) -> None:
    book = AddressBook(1000, tuple(mesh.addresses), tuple((role, Axes.of(sizes)) for role, sizes in axes))
    mesh.caller.set_address_book(book)
    until(lambda: mesh.caller.address_book() == book)


def pipeline(mesh: Mesh, gate: Gate | None = None) -> tuple[JobMesh, list[tuple[str, int, int]]]:
    """ROLLOUT and REWARD with two ranks along dp, REFERENCE alone; ROLLOUT 0 waits for the gate."""
    seen: list[tuple[str, int, int]] = []
    mesh.serve("ROLLOUT", Stage("ROLLOUT", 0, gate, seen), Stage("ROLLOUT", 1, None, seen))
    mesh.serve("REWARD", Stage("REWARD", 0, None, seen), Stage("REWARD", 1, None, seen))
    mesh.serve("REFERENCE", Stage("REFERENCE", 0, None, seen))
    declare(mesh, ("ROLLOUT", {"dp": 2}), ("REWARD", {"dp": 2}))
    return JobMesh(runtime=mesh.caller), seen


def step(part: Subgraph, items: list[int]) -> list[int]:
    for role in ("ROLLOUT", "REWARD", "REFERENCE"):
        items = list(part[role].call_batch(Stage.work, len(items), items))
    return items


def test_a_straggler_in_one_subgraph_does_not_stall_another(mesh: Mesh) -> None:
    gate = Gate()
    job, seen = pipeline(mesh, gate)
    results = job.subgraphs("dp").run(step, 10, list(range(10)))
    try:
        # The second half has gone through all roles while the first has not left its first one.
        assert results[5:] == [8, 9, 10, 11, 12]
        assert {(name, rank) for name, rank, _ in seen} == {("ROLLOUT", 1), ("REWARD", 1), ("REFERENCE", 0)}
        assert len(results) == 10
    finally:
        gate.open.set()
    assert list(results) == [item + 3 for item in range(10)]
    assert {item for name, rank, item in seen if (name, rank) == ("REWARD", 0)} == {1, 2, 3, 4, 5}


def test_run_as_a_whole_the_same_straggler_stalls_all(mesh: Mesh) -> None:
    """What sub-graphs are for: a barrier after each role lets nobody into the second."""
    gate = Gate()
    job, seen = pipeline(mesh, gate)
    samples = job["ROLLOUT"].call_batch(Stage.work, 10, list(range(10)))
    done = threading.Event()

    def whole() -> None:
        list(job["REWARD"].call_batch(Stage.work, 10, list(samples)))
        done.set()

    thread = threading.Thread(target=whole)
    thread.start()
    try:
        assert not done.wait(0.2)
        assert not [name for name, _, _ in seen if name == "REWARD"]
    finally:
        gate.open.set()
        thread.join(HANG_S)
    assert done.is_set()


async def test_coroutines_run_on_the_callers_loop(mesh: Mesh) -> None:
    job, _ = pipeline(mesh)

    async def async_step(part: Subgraph, items: list[int]) -> list[int]:
        return await part["REWARD"].call_batch(Stage.work, len(items), items)

    assert await job.subgraphs("dp").run(async_step, 3, [1, 2, 3]) == [2, 3, 4]


def test_an_error_is_owed_by_its_own_items(mesh: Mesh) -> None:
    job, _ = pipeline(mesh)

    def fail_first(part: Subgraph, items: list[int]) -> list[int]:
        if part.index == 0:
            raise ValueError("no luck in dp=0")
        return items

    results = job.subgraphs("dp").run(fail_first, 4, [1, 2, 3, 4])
    assert results[2:] == [3, 4]
    with pytest.raises(ValueError, match="no luck in dp=0"):
        _ = results[0]


def test_each_subgraph_has_the_ranks_at_its_coordinate(mesh: Mesh) -> None:
    sizes = {"ACTOR": 8, "ROLLOUT": 4, "REWARD": 1}
    members = tuple(MemberAddress(role, rank, 0, None) for role, size in sizes.items() for rank in range(size))
    axes = (("ACTOR", Axes.of({"dp": 2, "tp": 4})), ("ROLLOUT", Axes.of({"dp": 4})))
    book = AddressBook(1, members, axes)
    mesh.caller.set_address_book(book)
    mesh.wait_for_books(book)
    job = JobMesh(runtime=mesh.caller)
    parts = job.subgraphs("dp")
    assert [part["ACTOR"].ranks for part in parts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [part["ROLLOUT"].ranks for part in parts] == [(0, 1), (2, 3)], "two neighbours each"
    assert [part["REWARD"].ranks for part in parts] == [(0,), (0,)], "whole in both"
    assert [part["ACTOR"].ranks for part in job.subgraphs("tp")][1] == (1, 5)
    assert job.roles == ("ACTOR", "ROLLOUT", "REWARD") and len(job["ACTOR"]) == 8
    with pytest.raises(UsageError, match=r"no role has that axis; the axes are dp, tp"):
        job.subgraphs("pp")
    with pytest.raises(UsageError, match="there is no role 'CRITIC'"):
        _ = parts[0]["CRITIC"]
    book = AddressBook(2, members, (axes[0], ("ROLLOUT", Axes.of({"dp": 3}))))
    mesh.caller.set_address_book(book)
    mesh.wait_for_books(book)
    with pytest.raises(UsageError, match="ROLLOUT has 3, which is no multiple"):
        job.subgraphs("dp")
