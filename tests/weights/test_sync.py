"""`WeightSync` end to end: what is served, before, during and after a push."""

from __future__ import annotations

import numpy as np
import pytest

from rlmesh.errors import WeightsNotReady
from rlmesh.weights.arrays import ArraySink, ArraySource
from rlmesh.weights.planning.plan import Mode
from tests.own_time import HANG_S
from tests.weights.mesh import WeightMesh, arrays, segments


def test_a_push_brings_all_weights_to_all_sinks(mesh: WeightMesh) -> None:
    weights = arrays(1)
    mesh.add_source(ArraySource(weights))
    sinks = [ArraySink(arrays(0)) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    sync = mesh.sync(bucket_bytes=1 << 16)
    with pytest.raises(WeightsNotReady, match="ROLLOUT:0 has no weights to serve"), members[0].weights.serving():
        pass
    report = sync.push(1).result(HANG_S)
    assert report.version == 1 and report.sinks == ("ROLLOUT:0", "ROLLOUT:1")
    for member, sink in zip(members, sinks, strict=True):
        with member.weights.serving() as version:
            assert version == 1
            for name, value in weights.items():
                np.testing.assert_array_equal(sink.arrays[name], value)
    assert "by shm: same node" in str(sync.plan())
    sync.close()
    assert segments() == []


def test_a_source_or_a_sink_that_is_set_up_anew_is_found_by_the_next_push(mesh: WeightMesh) -> None:
    """A role that builds its model again is still the same process: nobody is told that the plan's memory is gone."""
    source, sinks = mesh.add_source(ArraySource(arrays(1))), [ArraySink(arrays(0)) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    sync = mesh.sync(bucket_bytes=1 << 16)
    sync.push(1).result(HANG_S)
    before = segments()

    source.send_weights(ArraySource(arrays(2)), name="ACTOR:0", runtime=mesh.runtime("ACTOR:0"))
    sync.push(2).result(HANG_S)
    sinks[1] = ArraySink(arrays(0))
    members[1].receive_weights(sinks[1], name="ROLLOUT:1")
    with pytest.raises(WeightsNotReady), members[1].weights.serving():
        pass
    sync.push(3).result(HANG_S)
    for member, sink in zip(members, sinks, strict=True):
        with member.weights.serving() as version:
            assert version == 3
            np.testing.assert_array_equal(sink.arrays["layer.3"], arrays(2)["layer.3"])
    assert len(segments()) == len(before), "what the source before had is freed"
    same = sync.plan()
    sync.push(4).result(HANG_S)
    assert sync.plan() is same


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
def test_a_source_of_the_callers_finds_a_new_sink_in_the_push_itself(
    mesh: WeightMesh, snapshot: bool, mode: Mode
) -> None:
    """It asks while it gives its weights, and gives them once more: they are the same until ``push`` returns."""
    sinks = [ArraySink(arrays(0), mode) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    source = ArraySource(arrays(1))
    sync = mesh.sync(source, bucket_bytes=1 << 12, snapshot=snapshot)
    sync.push(1).result(HANG_S)
    before = segments()
    sinks[1] = ArraySink(arrays(0), mode)
    members[1].receive_weights(sinks[1], name="ROLLOUT:1")
    pushing = sync.push(2)
    if snapshot:
        for array in source.arrays.values():
            array += 1
    pushing.result(HANG_S)
    for member, sink in zip(members, sinks, strict=True):
        with member.weights.serving() as version:
            assert version == 2
            np.testing.assert_array_equal(sink.arrays["layer.3"], arrays(1)["layer.3"])
    assert len(segments()) == len(before)
