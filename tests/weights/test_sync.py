"""`WeightSync` end to end: what is served, before, during and after a push."""

from __future__ import annotations

import numpy as np
import pytest

from rlmesh.errors import WeightsNotReady
from rlmesh.weights.arrays import ArraySink, ArraySource
from tests.weights.mesh import WeightMesh, arrays, segments


def test_a_push_brings_all_weights_to_all_sinks(mesh: WeightMesh) -> None:
    weights = arrays(1)
    mesh.add_source(ArraySource(weights))
    sinks = [ArraySink(arrays(0)) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    sync = mesh.sync(bucket_bytes=1 << 16)
    with pytest.raises(WeightsNotReady, match="ROLLOUT:0 has no weights to serve"), members[0].weights.serving():
        pass
    report = sync.push(1).result(10)
    assert report.version == 1 and report.sinks == ("ROLLOUT:0", "ROLLOUT:1")
    for member, sink in zip(members, sinks, strict=True):
        with member.weights.serving() as version:
            assert version == 1
            for name, value in weights.items():
                np.testing.assert_array_equal(sink.arrays[name], value)
    assert "by shm: same node" in str(sync.plan())
    sync.close()
    assert segments() == []
