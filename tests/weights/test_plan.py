"""Plans: buckets, channels, routes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.manifest import Casts, Manifest, TensorSpec
from rlmesh.weights.planning.buckets import ALIGNMENT, cut
from rlmesh.weights.planning.plan import DeviceLocation, Participant, SyncOptions, make_plan

SPECS = Manifest(
    (
        TensorSpec("embed", (100, 8), "float32"),
        TensorSpec("w", (10, 8), "float32"),
        TensorSpec("b", (8,), "float32"),
        TensorSpec("head", (100, 8), "float32", alias_of="embed"),
    )
)


def member(
    name: str, node: str = "a", device: str = "", *, peers: tuple[str, ...] = (), ipc: bool = True,
    hidden: tuple[str, ...] = (), shm: str = "",
) -> Participant:  # fmt: skip
    why_not = "" if ipc else "expandable segments"
    location = DeviceLocation(node, shm or f"shm-{node}", device, peers, bool(device) and ipc, why_not, hidden)
    return Participant(name, 0, location, SPECS)


def routes(
    sources: list[Participant], sinks: list[Participant], **options: object
) -> list[tuple[str, str, tuple[str, ...]]]:
    plan = make_plan(sources, sinks, SyncOptions(**options))  # type: ignore[arg-type]
    return [(route.channel, route.source, route.sinks) for route in plan.routes]


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 4000))
def test_buckets_hold_every_tensor_once_and_no_more_than_they_may(sizes: list[int], most: int) -> None:
    specs = Manifest(tuple(TensorSpec(f"t{i}", (size,), "uint8") for i, size in enumerate(sizes)))
    buckets = cut(specs, {spec.name: "uint8" for spec in specs}, most)
    assert [entry.name for bucket in buckets for entry in bucket.entries] == [spec.name for spec in specs]
    for bucket in buckets:
        assert bucket.nbytes <= most or len(bucket.entries) == 1
        end = 0
        for entry in bucket.entries:
            assert entry.offset >= end and entry.offset % ALIGNMENT == 0
            end = entry.offset + entry.nbytes
        assert end == bucket.nbytes
        assert pickle.loads(pickle.dumps(bucket)) == bucket


def test_one_node_is_written_once_for_all_its_sinks() -> None:
    assert routes([member("A:0"), member("A:1", "b")], [member("R:0"), member("R:1"), member("R:2", "b")]) == [
        ("shm", "A:0", ("R:0", "R:1")),
        ("shm", "A:1", ("R:2",)),
    ]
    assert routes([member("A:0")], [member("R:0", "b")]) == [("stream", "A:0", ("R:0",))]


def test_gpus_take_the_rank_that_is_nearest() -> None:
    sources = [
        member("A:0", device="gpu-0", peers=("gpu-1",)),
        member("A:1", device="gpu-1", peers=("gpu-0",)),
    ]
    sinks = [member("R:0", device="gpu-1", peers=("gpu-0",)), member("R:1", device="gpu-0", peers=("gpu-1",))]
    assert routes(sources, sinks) == [("cuda_ipc", "A:1", ("R:0",)), ("cuda_ipc", "A:0", ("R:1",))]
    far = [member("R:0", "b", device="gpu-9")]
    assert routes(sources, far) == [("collective", "A:0", ("R:0",))]


def test_a_gpu_that_a_mask_hides_is_read_where_processes_share_memory() -> None:
    source = member("A:0", device="gpu-0")
    sink = member("R:0", device="gpu-1", hidden=("gpu-0", "gpu-2"))
    plan = make_plan([source], [sink], SyncOptions())
    assert [(route.channel, route.why) for route in plan.routes] == [("cuda_ipc", "peer GPUs of one node")]
    apart = member("R:0", device="gpu-1", hidden=("gpu-0",), shm="of another container")
    assert routes([source], [apart])[0][0] == "collective"
    unreached = member("R:0", device="gpu-1", hidden=("gpu-2",))
    assert routes([source], [unreached])[0][0] == "shm"


def test_a_route_says_why_for_each_sink() -> None:
    sinks = [member("R:0", device="gpu-0"), member("R:1", device="gpu-1", peers=("gpu-0",))]
    plan = make_plan([member("A:0", device="gpu-0", peers=("gpu-1",))], sinks, SyncOptions())
    assert [route.why for route in plan.routes] == ["same GPU (R:0); peer GPUs of one node (R:1)"]


def test_what_makes_ipc_impossible_is_said() -> None:
    sources = [member("A:0", device="gpu-0", ipc=False)]
    assert routes(sources, [member("R:0", device="gpu-0")])[0][0] == "shm"
    with pytest.raises(WeightSyncError, match="no channel leads from A:0 to R:0: cuda_ipc: expandable segments"):
        routes(sources, [member("R:0", device="gpu-0")], channel="cuda_ipc")
    with pytest.raises(UsageError, match="each is 'auto' or one of"):
        routes(sources, [member("R:0")], channel="pigeon")


def test_channels_can_be_told_by_role_and_member() -> None:
    chosen = routes([member("A:0")], [member("R:0"), member("R:1")], channel={"R": "stream", "R:1": "shm"})
    assert chosen == [("stream", "A:0", ("R:0",)), ("shm", "A:0", ("R:1",))]


def test_the_plan_can_be_printed() -> None:
    text = str(make_plan([member("A:0")], [member("R:0")], SyncOptions(bucket_bytes=4000)))
    assert text == (
        "3.5 KiB in 3 tensors (1 tied names), 1 buckets of at most 3.8 KiB; source fenced\n"
        "  A:0 → R:0 (double_buffer) by shm: same node"
    )


def test_what_does_not_fit_is_told_sink_by_sink() -> None:
    other = Participant("R:1", 0, DeviceLocation("a", "shm-a"), Manifest((TensorSpec("embed", (100, 8), "bfloat16"),)))
    with pytest.raises(WeightSyncError, match="do not fit R:0, R:1; nothing was sent") as told:
        make_plan([member("A:0")], [member("R:0"), other], SyncOptions())
    assert "R:1: the sink has no w, b, head" in str(told.value) and "R:0:" not in str(told.value)
    assert (
        make_plan([member("A:0")], [member("R:0")], SyncOptions(casts=Casts.of(True))).nbytes == 100 * 32 + 10 * 32 + 32
    )


def test_ranks_of_a_source_hold_the_same() -> None:
    other = Participant("A:1", 0, DeviceLocation("a", "shm-a"), Manifest((TensorSpec("embed", (100, 8), "float32"),)))
    with pytest.raises(WeightSyncError, match="the ranks of the source hold different weights: A:0 and A:1"):
        make_plan([member("A:0"), other], [member("R:0")], SyncOptions())
