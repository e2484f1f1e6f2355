"""Weight sync in real jobs: processes that are killed, sharded sources, virtual nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmesh.testing import LocalCluster
from tests.own_time import OwnTime
from tests.weights import sharded_job, sync_job

CHANNELS = ["shm", *(pytest.param(one, marks=pytest.mark.slow) for one in ("stream", "collective"))]


@pytest.mark.case("O16")
@pytest.mark.case("O17")
@pytest.mark.parametrize("channel", CHANNELS)
def test_a_receiver_that_is_killed_in_bucket_7(channel: str, tmp_path: Path, own_time: OwnTime) -> None:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        sync_job.build(out, "one_kill", channel=channel, keep=False).submit("kill")
    seen = json.loads(out.read_text())
    assert seen["first"] == [[1, 1], [1, 1]]
    text, version, receiver, bucket = seen["error"]
    assert (version, receiver) == (2, "ROLLOUT:1") and own_time.of(seen["after_s"]) < 2.5
    # The sink dies before it answers; up to two buckets are on their way then.
    assert bucket in (6, 7, 8) and f"receiver ROLLOUT:1 failed in bucket {bucket} of 20 (by {channel})" in text
    assert "SIGKILL" in text and "ROLLOUT:0 keeps 1" in text
    assert seen["left"] == [1, 1], "the other one serves its old, complete version"
    assert seen["shared"] == 0, "no segment is left"
    assert seen["reborn"] is None, "after a restart it serves nothing until it is pushed to"
    assert seen["last"] == [[3, 3], [3, 3]]


@pytest.mark.parametrize("mode", [pytest.param("double_buffer", marks=pytest.mark.slow), "in_place"])
@pytest.mark.parametrize("channel", ["auto", pytest.param("stream", marks=pytest.mark.slow),
                                     pytest.param("collective", marks=pytest.mark.slow)])  # fmt: skip
def test_source_and_sink_in_one_process_have_memory_of_their_own(channel: str, mode: str, tmp_path: Path) -> None:
    """Fused roles share a main thread, on which the source gives its weights: the sink takes them beside it."""
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        sync_job.build(out, "together", channel=channel, mode=mode, fused=2).submit("together")
    seen = json.loads(out.read_text())
    actors, rollouts = seen["pids"]
    assert actors == rollouts and actors[0] != actors[1]
    assert seen["samples"] == [[[v, v], [v, v]] for v in (1, 2, 3)]
    assert seen["still"] == [[3, 3], [3, 3]], "training goes on in memory of its own"
    assert seen["copied"] == [[9, 9], [9, 9]]
    served, kind, text = seen["own"]
    assert served == 20 and seen["served"] == [[20, 20], [20, 20]]
    assert kind == "WeightSyncError" and "WouldDeadlock" in text
    assert seen["refused"][0] == "SourceRestarted" and "ACTOR:1 restarted" in seen["refused"][1]
    assert "version 21 was not committed" in seen["error"] and "SIGKILL" in seen["error"]
    assert seen["after_kill"] == [[20, 20] if mode == "double_buffer" else None, None]
    assert seen["last"] == [[22, 22], [22, 22]]


@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
def test_whoever_pushes_may_be_in_that_process_too(mode: str, tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        sync_job.build(out, "alone", mode=mode, fused=1).submit("alone")
    seen = json.loads(out.read_text())
    assert seen["samples"] == [[[v, v]] for v in (1, 2, 3)] and len(set(seen["pids"])) == 1


@pytest.mark.slow
@pytest.mark.case("O16")
@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
@pytest.mark.timeout(300)
@pytest.mark.parametrize("channel", ["shm", pytest.param("stream", marks=pytest.mark.soak),
                                     pytest.param("collective", marks=pytest.mark.soak)])  # fmt: skip
def test_a_receiver_that_is_killed_at_every_point_in_turn(channel: str, mode: str, tmp_path: Path) -> None:
    """Before and after each of 20 buckets, and as it flips; a push that succeeds lies between."""
    out, points = tmp_path / "seen.json", len(sync_job.POINTS)
    job = sync_job.build(out, "many", channel=channel, mode=mode, pushes=2 * points, kill_every=2, in_turn=True)
    with LocalCluster(run_root=tmp_path):
        job.submit("points")
    seen = json.loads(out.read_text())
    assert seen["faults"] == [] and seen["kills"] == points


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.case("O17")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
def test_a_thousand_pushes_with_kills_serve_nothing_torn_and_leak_nothing(mode: str, tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        sync_job.build(out, "many", mode=mode, pushes=1000, kill_every=25).submit("many")
    seen = json.loads(out.read_text())
    assert seen["faults"] == [] and seen["kills"] == 40
    first, last = seen["levels"][0], seen["levels"][-1]
    assert last[0] <= first[0] + (8 << 20), "shared memory is flat"
    for before, after in zip(first[1:], last[1:], strict=True):
        assert after <= before + (30 << 20), "memory of the processes is flat"


@pytest.mark.slow
@pytest.mark.case("O18")
def test_sharded_ranks_push_to_two_sinks(tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        sharded_job.build(out).submit("sharded")
    seen = json.loads(out.read_text())
    assert seen["same"] == [True, True] and seen["after_step"] == [True, True] and not seen["stale"]
    assert "ACTOR:0 → ROLLOUT:0 (double_buffer), ROLLOUT:1 (double_buffer) by shm" in seen["plan"]
    assert "each rank sends its own shards" in seen["plan"]
