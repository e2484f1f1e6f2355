"""Four GPUs whose NVML, bus and fastest-first orders all differ; one is divided into two slices."""

from __future__ import annotations

import os
from pathlib import Path

from rlmesh.agent.processes.ownership import MEMBER_MARK
from rlmesh.testing import FakeGpu, FakeNvml, FakeSlice

GIB = 2**30
SLOW, DIVIDED, FAST, OTHER = "GPU-0c00", "GPU-1a11", "GPU-2b22", "GPU-3d33"
SLICES = ("MIG-aaaa", "MIG-bbbb")

gpus = FakeNvml(
    [
        FakeGpu(
            DIVIDED, "00000000:86:00.0", mig=(FakeSlice(SLICES[1], 40 * GIB, 2), FakeSlice(SLICES[0], 20 * GIB, 1))
        ),
        FakeGpu(FAST, "00000000:AF:00.0", "NVIDIA B200", 192 * GIB),
        FakeGpu(SLOW, "00000000:3B:00.0", "NVIDIA A100-SXM4-40GB", 40 * GIB),
        FakeGpu(OTHER, "00000000:D8:00.0"),
    ],
    events=Path(os.environ["FAKE_GPU_EVENTS"]) if "FAKE_GPU_EVENTS" in os.environ else None,
)
"""By bus: SLOW, DIVIDED, FAST, OTHER. Fastest first: FAST, then those of the same model, then SLOW."""

healthy = FakeNvml([FakeGpu(f"GPU-{i}", f"00000000:0{i}:00.0", switch=True, minor=i) for i in range(4)], gpus.events)
"""Four GPUs alike, on a switch."""


class _Swapped(FakeNvml):
    """Shows members another GPU than the agents: as if the machine had renumbered them."""

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeSlice) -> str:
        uuid = super().nvmlDeviceGetUUID(handle)
        if MEMBER_MARK not in os.environ:
            return uuid
        return {"GPU-0": "GPU-1", "GPU-1": "GPU-0"}.get(uuid, uuid)


swapped = _Swapped(healthy.gpus)
