"""Simulated GPUs: a library with the functions of pynvml that rlmesh uses.

::

    # fleet.py
    gpus = FakeNvml([FakeGpu("GPU-a", "00000000:3B:00.0"), FakeGpu("GPU-b", "00000000:86:00.0")])

    with LocalCluster(nodes=1, nvml="fleet:gpus"):
        job.submit("test")

Jobs are placed on these GPUs, which the environment of their members names. Events of a GPU during a job are written
to a file (:meth:`FakeNvml.happen`), which the processes of the job read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["FakeGpu", "FakeNvml", "FakeSlice"]

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class FakeSlice:
    uuid: str
    memory_bytes: int
    gpu_instance: int = 0
    compute_instance: int = 0


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """A GPU. ``links`` has the other end's UUID and the number of NVLinks; ``switch`` connects it to all GPUs on the
    switch."""

    uuid: str
    bus_id: str
    model: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 80 * 2**30
    mig: tuple[FakeSlice, ...] | None = None
    links: tuple[tuple[str, int], ...] = ()
    switch: bool = False
    minor: int = 0
    prohibited: bool = False


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(_TEXTS.get(value, f"error {value}"))


_TEXTS = {3: "Not Supported", 6: "Not Found", 9: "Driver Not Loaded", 10: "Timeout", 15: "GPU is lost"}


@dataclass
class FakeNvml:
    """The library. The order of ``gpus`` is that of NVML's indexes.

    Args:
        events: file of the GPUs' events, one JSON object per line; read at each call.
        broken: number of the error with which initialisation fails.
    """

    gpus: Sequence[FakeGpu]
    events: Path | None = None
    broken: int = 0
    opened: int = 0
    _read: int = field(default=0, repr=False)

    NVMLError = NVMLError
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_COMPUTEMODE_PROHIBITED = 2
    nvmlEventTypeDoubleBitEccError = 2
    nvmlEventTypeXidCriticalError = 8

    def happen(self, uuid: str, what: str, value: int = 1) -> None:
        """Add an event of a GPU: ``xid`` (with its number), ``ecc`` (number of errors), ``lost``, ``remap``, ``uuid``
        (its UUID becomes ``<uuid>-other``)."""
        assert self.events is not None
        with self.events.open("a") as file:
            file.write(json.dumps([uuid, what, value]) + "\n")

    def _happened(self) -> list[tuple[str, str, int]]:
        if self.events is None or not self.events.exists():
            return []
        return [tuple(json.loads(line)) for line in self.events.read_text().splitlines()]

    def _sum(self, gpu: FakeGpu, what: str) -> int:
        return sum(value for uuid, kind, value in self._happened() if uuid == gpu.uuid and kind == what)

    def _alive(self, handle: Any) -> Any:
        if not self.opened:
            raise NVMLError(1)
        if isinstance(handle, FakeGpu) and self._sum(handle, "lost"):
            raise NVMLError(15)
        return handle

    # The library's functions

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(self.broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeSlice) -> str:
        other = isinstance(handle, FakeGpu) and self._sum(handle, "uuid")
        return f"{handle.uuid}-other" if other else handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(busId=handle.bus_id)

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.model

    def nvmlDeviceGetMinorNumber(self, handle: FakeGpu) -> int:
        return handle.minor

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeSlice) -> Any:
        return SimpleNamespace(total=self._alive(handle).memory_bytes)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> tuple[int, int]:
        return (int(handle.mig is not None),) * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeSlice:
        if handle.mig is None or index >= len(handle.mig):
            raise NVMLError(6)
        return handle.mig[index]

    def nvmlDeviceGetGpuInstanceId(self, handle: FakeSlice) -> int:
        return handle.gpu_instance

    def nvmlDeviceGetComputeInstanceId(self, handle: FakeSlice) -> int:
        return handle.compute_instance

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeGpu, kind: int, counter: int) -> int:
        return self._sum(self._alive(handle), "ecc")

    def nvmlDeviceGetRemappedRows(self, handle: FakeGpu) -> tuple[int, int, int, int]:
        return (0, 0, 0, int(bool(self._sum(self._alive(handle), "remap"))))

    def nvmlDeviceGetComputeMode(self, handle: FakeGpu) -> int:
        return self.NVML_COMPUTEMODE_PROHIBITED if handle.prohibited else 0

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, capability: int) -> int:
        linked = dict(one.links).get(other.uuid) or (one.switch and other.switch)
        return self.NVML_P2P_STATUS_OK if linked else 5

    def nvmlDeviceGetNvLinkState(self, handle: FakeGpu, link: int) -> int:
        count = 18 if handle.switch else sum(count for _, count in handle.links)
        if link >= count:
            raise NVMLError(3)
        return self.NVML_FEATURE_ENABLED

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: FakeGpu, link: int) -> Any:
        ends = [uuid for uuid, count in handle.links for _ in range(count)]
        far = {gpu.uuid: gpu.bus_id for gpu in self.gpus}
        return SimpleNamespace(busId=far.get(ends[link], "") if link < len(ends) else "switch")

    def nvmlDeviceGetSupportedEventTypes(self, handle: FakeGpu) -> int:
        return self.nvmlEventTypeXidCriticalError | self.nvmlEventTypeDoubleBitEccError

    def nvmlEventSetCreate(self) -> dict[str, int]:
        return {}

    def nvmlDeviceRegisterEvents(self, handle: FakeGpu, types: int, events: dict[str, int]) -> None:
        events[handle.uuid] = types

    def nvmlEventSetWait_v2(self, events: dict[str, int], timeout_ms: int) -> Any:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            happened = self._happened()
            while self._read < len(happened):
                uuid, what, value = happened[self._read]
                self._read += 1
                if what == "xid" and uuid in events:
                    gpu = self.nvmlDeviceGetHandleByUUID(uuid)
                    return SimpleNamespace(device=gpu, eventType=self.nvmlEventTypeXidCriticalError, eventData=value)
            if time.monotonic() >= deadline:
                raise NVMLError(self.NVML_ERROR_TIMEOUT)
            time.sleep(POLL_S)

    def nvmlEventSetFree(self, events: dict[str, int]) -> None:
        events.clear()
