"""Case n02: a source that restarted has lost what it had learnt; no push brings that to the engines as new."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import SourceRestarted, UsageError, WeightSyncError
from rlmesh.testing import LocalCluster
from rlmesh.weights.arrays import ArraySink, ArraySource
from rlmesh.weights.planning.source_state import ConfirmedVersion, LastCommit, RankState, check, last_commit_of
from tests.own_time import HANG_S, OwnTime
from tests.weights import restart_job
from tests.weights.mesh import WeightMesh, arrays

pytestmark = pytest.mark.case("n02")

A, B = "ACTOR:0", "ACTOR:1"
LEFT = LastCommit(10, {A: 0, B: 0})
ON = RankState(0, None, 10)
"""The process that sent last."""


@pytest.mark.parametrize(
    ("a", "b", "version"),
    [
        (ON, ON, 11),
        (ON, ON, 3),  # the caller's own numbers
        (ON, RankState(1, 10), 11),
        (RankState(1, 10), RankState(2, 10), 11),
        (RankState(1, 8), RankState(1, 8), 8),  # the caller went back with it
        (RankState(1, 8), RankState(1, 8), 9),
        (RankState(1, 8), RankState(1, 8), 10),
        (RankState(0, 8), RankState(0, 8), 8),  # in the same processes
        (RankState(1, 12), RankState(1, 12), 12),  # a checkpoint of more than was pushed
        (RankState(1, 12), RankState(1, 12), 13),
        (RankState(0, None, None), ON, 11),  # a sync anew, from a source of its own process
    ],
)
def test_a_push_goes_on_from_where_the_source_stands(a: RankState, b: RankState, version: int) -> None:
    assert check(LEFT, {A: a, B: b}, None, version) is not None


@pytest.mark.parametrize(
    ("a", "b", "version", "told"),
    [
        (RankState(1), ON, 11, "ACTOR:0 restarted since version 10 .* ACTOR:0 does not say what it has"),
        (RankState(1), RankState(1), 10, "ACTOR:0 and ACTOR:1 do not say what they have"),
        (RankState(1), RankState(1), 0, "restored=VERSION"),
        (ON, RankState(1, 8), 8, "ACTOR:1 was restored from version 8; ACTOR:0 is where the last push left it"),
        (
            RankState(1, 8),
            RankState(1, 7),
            7,
            "ACTOR:0 was restored from version 8; ACTOR:1 was restored from version 7",
        ),
        (RankState(1, 10), RankState(1), 11, "ACTOR:1"),
        (RankState(1, 8), RankState(1, 8), 11, "push version 8 again"),  # a caller that did not notice
        (RankState(1, 8), RankState(1, 8), 7, "restored from version 8"),
        (RankState(1, 12), RankState(1, 12), 11, "restored from version 12"),
        (RankState(0, 8), RankState(0, 8), 11, "ACTOR:0 and ACTOR:1 went back"),
    ],
)
def test_what_was_lost_is_refused(a: RankState, b: RankState, version: int, told: str) -> None:
    with pytest.raises(SourceRestarted, match=told) as refused:
        check(LEFT, {A: a, B: b}, None, version)
    assert refused.value.version == version and refused.value.sent == 10
    assert refused.value.code == "RM502" and set(refused.value.restored) == set(refused.value.members)


def test_the_first_push_knows_of_nothing_that_could_be_lost() -> None:
    for rank in (RankState(), RankState(2), RankState(0, 7)):
        assert check(None, {A: rank, B: rank}, None, 1) is None
    with pytest.raises(SourceRestarted, match="ACTOR:0 was restored from version 7; ACTOR:1 does not say"):
        check(None, {A: RankState(0, 7), B: RankState()}, None, 8)


def test_the_callers_word_holds_for_the_processes_that_it_was_given_for() -> None:
    ranks = {A: RankState(1), B: RankState(1)}
    told = ConfirmedVersion(8, {A: 1, B: 1})
    assert check(LEFT, ranks, told, 11) == LastCommit(8, {A: 1, B: 1})
    with pytest.raises(SourceRestarted):
        check(LEFT, {A: RankState(2), B: RankState(1)}, told, 11)
    with pytest.raises(SourceRestarted, match=r"source_restored\(8\) was called, but ACTOR:0 was restored from"):
        check(LEFT, {A: RankState(1, 5), B: RankState(1)}, told, 11)


def test_who_remembers_the_last_commit() -> None:
    ranks = {A: RankState(1), B: RankState(0, None, 6)}
    assert last_commit_of([LastCommit(4, {A: 0, B: 0}), LastCommit(5, {A: 0, B: 0})], ranks) == LastCommit(
        5, {A: 0, B: 0}
    )
    assert last_commit_of([LastCommit(5, {"OTHER:0": 0})], ranks) == LastCommit(6, {B: 0}), (
        "the ranks themselves, if no sink does"
    )
    assert last_commit_of([], {A: RankState()}) is None


# With members.


def served(mesh: WeightMesh, rank: int = 0) -> int | None:
    return mesh.sinks[f"ROLLOUT:{rank}"].weights.version


def test_a_source_that_restarted_is_refused_until_somebody_says_what_it_has(mesh: WeightMesh) -> None:
    mesh.add_source(ArraySource(arrays(1)))
    sink = ArraySink(arrays(0))
    mesh.add_sink(sink, 0)
    sync = mesh.sync()
    sync.push(3).result(HANG_S)
    mesh.restart_source(ArraySource(arrays(9)))
    for version in (4, 4, 3):
        with pytest.raises(SourceRestarted, match=f"version {version} was not pushed: ACTOR:0 restarted since"):
            sync.push(version).result(HANG_S)
    assert served(mesh) == sync.version == 3
    np.testing.assert_array_equal(sink.arrays["layer.1"], arrays(1)["layer.1"])

    mesh.change_source(ArraySource(arrays(2)), restored=2)
    with pytest.raises(SourceRestarted, match="ACTOR:0 was restored from version 2"):
        sync.push(4).result(HANG_S)
    sync.push(2).result(HANG_S)  # the caller goes back, too
    np.testing.assert_array_equal(sink.arrays["layer.1"], arrays(2)["layer.1"])
    sync.push(3).result(HANG_S)

    mesh.restart_source(ArraySource(arrays(3)), restored=3)
    sync.push(4).result(HANG_S)
    mesh.restart_source(ArraySource(arrays(4)))
    sync.source_restored(4)
    assert sync.push(5).result(HANG_S).version == 5
    with pytest.raises(UsageError, match="source_restored"):
        sync.source_restored(-1)


def test_a_rank_of_several_and_a_rank_that_is_restored_elsewhere(mesh: WeightMesh) -> None:
    for rank in range(2):
        mesh.add_source(ArraySource(arrays(1)), rank)
    mesh.add_sink(ArraySink(arrays(0)), 0)
    sync = mesh.sync()
    sync.push(5).result(HANG_S)
    mesh.restart_source(ArraySource(arrays(1)), 1)
    with pytest.raises(SourceRestarted, match="ACTOR:1 restarted") as refused:
        sync.push(6).result(HANG_S)
    assert refused.value.members == ("ACTOR:1",) and refused.value.restored == {"ACTOR:1": None}
    mesh.change_source(ArraySource(arrays(1)), 1, restored=4)
    with pytest.raises(SourceRestarted, match="ACTOR:1 was restored from version 4; ACTOR:0 is where"):
        sync.push(4).result(HANG_S)
    mesh.change_source(ArraySource(arrays(1)), 0, restored=4)
    sync.push(4).result(HANG_S)
    assert served(mesh) == 4


def test_a_caller_that_is_new_asks_the_sinks(mesh: WeightMesh) -> None:
    """Both the trainer and the actor restarted: the sinks know what was committed last, and by whom."""
    mesh.add_source(ArraySource(arrays(1)))
    mesh.add_sink(ArraySink(arrays(0)), 0)
    mesh.sync().push(7).result(HANG_S)
    assert mesh.sync().push(8).result(HANG_S).version == 8, "the actor is what it was"
    mesh.restart_source(ArraySource(arrays(2)))
    with pytest.raises(SourceRestarted, match="version 8 was committed"):
        mesh.sync().push(9).result(HANG_S)
    mesh.sync(restored=6).push(7).result(HANG_S)
    mesh.restart_source(ArraySource(arrays(2)), restored=6)
    mesh.sync().push(6).result(HANG_S)


def test_sinks_that_were_replaced_too_leave_it_to_the_ranks(mesh: WeightMesh) -> None:
    for rank in range(2):
        mesh.add_source(ArraySource(arrays(1)), rank)
    mesh.add_sink(ArraySink(arrays(0)), 0)
    mesh.sync().push(7).result(HANG_S)
    mesh.restart_sink(ArraySink(arrays(0)), 0)
    mesh.restart_source(ArraySource(arrays(1)), 1)
    with pytest.raises(SourceRestarted, match="ACTOR:1 restarted since version 7"):
        mesh.sync().push(8).result(HANG_S)


def test_catching_up_takes_the_weights_of_that_version_only(mesh: WeightMesh) -> None:
    mesh.add_source(ArraySource(arrays(1)))
    mesh.add_sink(ArraySink(arrays(0)), 0)
    sync = mesh.sync()
    sync.push(7).result(HANG_S)
    sync.push(8).result(HANG_S)
    mesh.restart_source(ArraySource(arrays(2)), restored=7)
    mesh.restart_sink(ArraySink(arrays(0)), 0)
    told = "no sink can catch up with version 8: the source stands at version 7"
    for _ in range(2):
        with pytest.raises(SourceRestarted, match=told):
            sync.catch_up()
    with pytest.raises(SourceRestarted, match="restored from version 7"):
        sync.push(9).result(HANG_S)
    sync.source_restored(7)
    with pytest.raises(SourceRestarted, match=told):
        sync.catch_up()
    assert served(mesh) is None
    sync.push(7).result(HANG_S)
    assert served(mesh) == 7


def test_a_source_that_restarts_while_it_is_asked(mesh: WeightMesh) -> None:
    """Its old process made the plan; the new one knows nothing of it, and has other weights."""
    mesh.add_source(ArraySource(arrays(1)))
    mesh.add_sink(ArraySink(arrays(0)), 0)
    sync = mesh.sync()
    sync.push(1).result(HANG_S)
    sync.plan()
    mesh.restart_source(ArraySource(arrays(2)))
    with pytest.raises(WeightSyncError):
        sync.push(2).result(HANG_S)
    assert served(mesh) == 1


# With processes.


@pytest.mark.parametrize("restores", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_actor_takes_back_no_version_that_was_served(tmp_path: Path, restores: bool) -> None:
    """Its weights count its steps: the rollouts never serve fewer than they are said to."""
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        restart_job.build(out, restores=restores).submit("lost")
    seen: dict[str, Any] = json.loads(out.read_text())
    assert all(version == value for version, value in seen["served"]), seen
    assert [version for version, _ in seen["served"]] == ([1, 2, 3, 3, 4, 5] if restores else [1, 2, 3, 3])
    kind, text = seen["error"]
    assert kind == "SourceRestarted"
    if restores:
        assert "ACTOR:0 was restored from version 2" in text
        assert seen["events"] == [["restarting", [None]], ["ready", [2]]]
    else:
        assert "version 4 was not pushed: ACTOR:0 restarted since version 3 was committed" in text
        assert seen["events"] == [["restarting", [None]], ["ready", [None]]]
    assert seen["on_restart"] == ([2] if restores else [None])


@pytest.mark.case("n06")
def test_an_error_leaves_the_block_although_a_source_is_busy(tmp_path: Path, own_time: OwnTime) -> None:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        restart_job.build(out, scenario="busy").submit("busy")
    seen = json.loads(out.read_text())
    assert own_time.of(seen["left_s"]) < 1.0, seen
    assert seen["error"] == "the trainer gives up"


@pytest.mark.case("n06")
@pytest.mark.parametrize("snapshot", [False, True])
def test_an_error_leaves_the_block_in_the_middle_of_a_push(mesh: WeightMesh, snapshot: bool, own_time: OwnTime) -> None:
    import threading

    go_on, arrived = threading.Event(), threading.Event()

    def tap(step: str, bucket: int) -> None:
        if step == "stage":
            arrived.set()
            go_on.wait(HANG_S)

    mesh.add_source(ArraySource(arrays(1)))
    mesh.add_sink(ArraySink(arrays(0)), 0, tap=tap)
    began = 0.0
    with pytest.raises(RuntimeError, match="enough"), mesh.sync(snapshot=snapshot) as sync:
        sync.push(1)
        assert arrived.wait(HANG_S)
        began = time.monotonic()
        raise RuntimeError("enough")
    assert own_time.since(began) < 1.0
    go_on.set()
