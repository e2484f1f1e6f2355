"""What is checked between nodes before a job starts, as pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmesh.rendezvous.preflight import PairResult, clock_notes, matrix, problems, targets_of
from tests.cli.test_doctor import GOOD

NAMES = {0: "box0", 1: "box1", 2: "box2"}
RESULTS = [
    PairResult(0, 1, 0.0004), PairResult(0, 2, 0.001, clock_s=7.0), PairResult(1, 0, 0.002),
    PairResult(1, 2, error="nobody answered at tcp://10.0.0.2:1 within 5 s"),
]  # fmt: skip


def test_the_matrix_shows_latency_and_failure_of_each_pair() -> None:
    assert matrix(NAMES, RESULTS) == (
        "            → 0      → 1      → 2\n"
        "0 box0        ·   0.4 ms   1.0 ms\n"
        "1 box1   2.0 ms        ·   FAILED\n"
        "2 box2  no word  no word        ·"
    )


def test_pairs_that_do_not_reach_each_other_are_named() -> None:
    (problem,) = problems(NAMES, RESULTS, dict.fromkeys(NAMES, GOOD))
    assert problem.startswith("node box1 does not reach node box2: nobody answered at tcp://10.0.0.2:1 within 5 s.")
    assert problems(NAMES, RESULTS[:3], {}, [2]) == ["node box2 did not say what it can reach"]


def test_nodes_that_are_not_fit_are_named_with_what_to_do() -> None:
    facts = {0: GOOD, 1: replace(GOOD, files=(64, 64))}
    (problem,) = problems(NAMES, [], facts)
    assert problem.startswith("node box1: descriptors: 64 open files") and "ulimit -n" in problem


def test_clocks_that_differ_are_told() -> None:
    assert clock_notes(NAMES, RESULTS) == ["the clock of node box2 is +7.0 s from that of node box0"]


@pytest.mark.parametrize("count", [2, 5, 100])
def test_each_node_is_tried_by_somebody(count: int) -> None:
    ranks = list(range(count))
    tried = {rank: targets_of(rank, ranks) for rank in ranks}
    assert all(rank not in targets and 0 not in targets for rank, targets in tried.items())
    assert {target for targets in tried.values() for target in targets} == set(ranks[1:])
    assert max(map(len, tried.values())) <= 31
