"""Leases over several nodes: groups that hold one node and want another never wait for each other in a circle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.placement.device_leases import Acquisition, LeaseTable, MemberKey
from rlmesh.testing import LocalCluster
from tests.placement import turns_job


@dataclass
class Rank:
    """A member that wants its devices ``rounds`` times, and each time needs all of its group awake."""

    key: MemberKey
    node: int
    rounds: int
    way: Acquisition | None = None
    had: set[int] = field(default_factory=set)
    waits: int | None = None
    awake: bool = False


class World:
    """Nodes with a table each, and groups of one rank per node. ``ordered``: ranks ask all nodes, in their order;
    else each its own."""

    def __init__(self, groups: dict[str, tuple[int, ...]], rounds: int, *, ordered: bool = True) -> None:
        self.tables = {node: LeaseTable() for nodes in groups.values() for node in nodes}
        self.groups = groups
        self.ordered = ordered
        self.ranks = [
            Rank((role, i, 0), node, rounds) for role, nodes in groups.items() for i, node in enumerate(nodes)
        ]

    def _together(self, rank: Rank, node: int) -> dict[MemberKey, tuple[str, ...]]:
        group = [other for other in self.ranks if other.key[0] == rank.key[0]]
        if not self.ordered:
            group = [other for other in group if other.node == node]
        return {other.key: (f"dev-{node}",) if other.node == node else () for other in group}

    def _note(self, node: int, got: Iterable[MemberKey]) -> None:
        for key in got:
            rank = next(rank for rank in self.ranks if rank.key == key)
            if rank.waits == node:
                rank.waits = None
                rank.had.add(node)

    def moves(self) -> list[tuple[Rank, str]]:
        """What may happen next."""
        found: list[tuple[Rank, str]] = []
        for rank in self.ranks:
            mates = [other for other in self.ranks if other.key[0] == rank.key[0]]
            if rank.awake:
                # The collective ends when all have come to it.
                if all(mate.awake or mate.rounds < rank.rounds for mate in mates):
                    found.append((rank, "sleep"))
            elif rank.rounds and rank.waits is None:
                found.append((rank, "ask"))
        return found

    def do(self, rank: Rank, what: str) -> None:
        if what == "sleep":
            rank.awake, rank.rounds = False, rank.rounds - 1
            for held in sorted(rank.had, reverse=True):
                self._note(held, self.tables[held].give_back(rank.key, 0))
            rank.had, rank.way = set(), None
            return
        if rank.way is None:
            rank.way = Acquisition(self.groups[rank.key[0]] if self.ordered else [rank.node])
        node = rank.way.next()
        if node is None:
            rank.awake = True
            self._check(rank)
            return
        rank.waits = node
        self._note(node, self.tables[node].ask(rank.key, self._together(rank, node), 0))

    def _check(self, rank: Rank) -> None:
        others = [o for o in self.ranks if o.awake and o.node == rank.node and o.key[0] != rank.key[0]]
        assert not others, f"{rank.key} and {others[0].key} are awake on node {rank.node}"

    @property
    def stuck(self) -> bool:
        return not self.moves() and any(rank.rounds for rank in self.ranks)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_no_schedule_deadlocks(groups: list[set[int]], rounds: int, chance: Any) -> None:
    """Groups over any nodes ask in any order, and everybody has all of its turns; no two groups are awake on a node."""
    world = World(
        {f"G{i}": tuple(sorted(nodes, key=lambda _: chance.random())) for i, nodes in enumerate(groups)}, rounds
    )
    while moves := world.moves():
        world.do(*chance.choice(moves))
    assert not world.stuck


def test_without_the_order_they_would() -> None:
    world = World({"A": (0, 1), "B": (0, 1)}, 1, ordered=False)
    a0, a1, b0, b1 = world.ranks
    for rank in (a0, b1, b0, a1):
        world.do(rank, "ask")
    for rank in (a0, b1):
        world.do(rank, "ask")  # awake, and waiting for the other rank of its group
    assert world.stuck


def test_a_turn_of_a_group_ends_with_its_ranks_on_the_node() -> None:
    """Rank 0 is on this node, rank 1 on another one, whose end this node does not hear of."""
    table = LeaseTable()
    group = {("A", 0, 0): ("dev",), ("A", 1, 0): ()}
    other: dict[MemberKey, tuple[str, ...]] = {("B", 0, 0): ("dev",)}
    assert table.ask(("A", 1, 0), group, 0) == [("A", 1, 0)]
    assert table.ask(("A", 0, 0), group, 0) == [("A", 0, 0)]
    assert table.ask(("B", 0, 0), other, 0) == []
    assert table.gone(("A", 0, 0), 1) == [("B", 0, 0)]
    assert table.give_back(("A", 1, 0), 2) == [], "what is said too late does no harm"


def test_a_rank_of_another_node_may_ask_before_this_nodes_own_are_started() -> None:
    table = LeaseTable()
    assert table.ask(("A", 1, 0), {("A", 0, 0): (), ("A", 1, 0): ()}, 0) == [("A", 1, 0)]
    assert table.ask(("A", 0, 0), {("A", 0, 0): ("dev",), ("A", 1, 0): ()}, 0) == [("A", 0, 0)]
    assert table.ask(("B", 0, 0), {("B", 0, 0): ("dev",)}, 0) == []


def test_two_groups_on_two_nodes_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with LocalCluster(nodes=2, devices_per_node=1, run_root=tmp_path):
        result = turns_job.build(out).submit("turns")
    seen = json.loads(out.read_text())
    assert len(seen) == 4 * turns_job.ROUNDS + 2 + 4
    for device in {devices[0] for _, _, devices, _, _ in seen}:
        times = sorted((began, ended, role) for role, _, devices, began, ended in seen if devices == [device])
        for (_, ended, one), (began, _, two) in itertools.pairwise(times):
            assert one == two or ended <= began, "two groups were awake on one device"
    (restart,) = result.status.restarts
    assert restart.unit == "ONE"
