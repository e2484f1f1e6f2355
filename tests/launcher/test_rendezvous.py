"""The roster of a job's nodes: who may join, who is missing, when the job may start."""

from __future__ import annotations

import pytest

from rlmesh.errors import LaunchError
from rlmesh.rendezvous.state import ANY_RANK, SILENT_S, NodeHello, Roster, node_hosts
from rlmesh.runtime.transport.inet import is_loopback


def hello(rank: int, name: str = "", **other: object) -> NodeHello:
    name = name or f"box{rank}"
    values: dict[str, object] = {"host": "10.0.0.2", "head_host": "10.0.0.1", "version": "1", "nnodes": 0, **other}
    return NodeHello(f"token-{name}", rank, name, pid=7, **values)  # type: ignore[arg-type]


def roster(least: int = 3, most: int = 3) -> Roster:
    return Roster(least, most, "box0, pid 1", "1", last_call_s=30.0)


def test_the_roster_is_complete_with_all_nodes_in_any_order() -> None:
    nodes = roster()
    assert [nodes.join(hello(rank), 0.0).node_rank for rank in (2, 1)] == [2, 1]
    assert nodes.complete(0.0)
    assert [node.node_rank for node in nodes.nodes()] == [1, 2]


def test_says_who_is_there_and_who_is_missing() -> None:
    nodes = roster()
    nodes.join(hello(2), 0.0)
    assert not nodes.complete(1e9)
    assert nodes.describe() == (
        "2 of 3 nodes are there: 0 (box0, pid 1), 2 (box2, 10.0.0.2, pid 7); missing: node rank 1"
    )


def test_free_ranks_are_given_by_arrival() -> None:
    nodes = roster()
    assert [nodes.join(hello(ANY_RANK, name), 0.0).node_rank for name in "ab"] == [1, 2]
    with pytest.raises(LaunchError, match="one too many"):
        nodes.join(hello(ANY_RANK, "c"), 0.0)


def test_joining_again_changes_nothing() -> None:
    nodes = roster()
    assert nodes.join(hello(1), 0.0) is nodes.join(hello(1), 5.0)
    assert nodes.nodes()[0].seen_at == 5.0


@pytest.mark.parametrize(("said", "error"), [
    (hello(0), "is the head itself"),
    (hello(3), "is not one of 3 nodes"),
    (hello(1, version="2"), "install the same version"),
    (hello(1, nnodes=4), "was told of 4 nodes"),
])  # fmt: skip
def test_who_does_not_fit_is_told_why(said: NodeHello, error: str) -> None:
    with pytest.raises(LaunchError, match=error):
        roster().join(said, 0.0)


def test_a_rank_is_free_again_when_its_node_is_gone() -> None:
    nodes = roster()
    nodes.join(hello(1), 0.0)
    with pytest.raises(LaunchError, match=r"node rank 1 of other .* is taken: node 1 \(box1, 10\.0\.0\.2, pid 7\)"):
        nodes.join(hello(1, "other"), 1.0)
    nodes.leave("token-box1", 2.0)
    nodes.join(hello(1, "other"), 2.0)
    nodes.join(hello(1, "third"), 2.0 + SILENT_S)  # the other one is silent
    assert [node.hello.name for node in nodes.nodes()] == ["third"]


def test_silent_nodes_are_dropped_before_the_start_only() -> None:
    nodes = roster()
    nodes.join(hello(1), 0.0)
    nodes.closed = True
    assert nodes.drop_silent(1000.0) == []
    nodes.closed = False
    assert [node.node_rank for node in nodes.drop_silent(SILENT_S)] == [1]
    assert nodes.missing() == [1, 2]


def test_fewer_nodes_will_do_after_a_last_call() -> None:
    nodes = roster(2, 4)
    assert not nodes.complete(100.0)
    nodes.join(hello(3), 100.0)
    assert not nodes.complete(129.9)
    assert nodes.complete(130.0)
    nodes.join(hello(1), 129.0)
    assert not nodes.complete(130.0)


def test_the_heads_address_is_the_one_that_others_reached() -> None:
    nodes = roster()
    nodes.join(hello(1, host="127.0.0.1", head_host="127.0.0.1"), 0.0)
    assert node_hosts(nodes, "0.0.0.0", is_loopback) == ["127.0.0.1", "127.0.0.1"]
    nodes.join(hello(2, host="10.0.0.3", head_host="10.0.0.9"), 0.0)
    assert node_hosts(nodes, "0.0.0.0", is_loopback)[0] == "10.0.0.9"
    assert node_hosts(roster(), "127.0.0.2", is_loopback) == ["127.0.0.2"]
