"""Which news about a GPU means that it must not be used any more. Pure.

Xids are the driver's error numbers. Most are the program's own fault (an illegal access is 31) or were dealt with
(a row that was remapped is 63); NVIDIA's catalogue says which ones ask for a reset or a repair.
Source: https://docs.nvidia.com/deploy/xid-errors/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlmesh.placement.machine.masks import GpuFacts


BAD_XIDS: Mapping[int, str] = {
    46: "the GPU stopped processing",
    48: "a memory error that ECC could not correct",
    62: "its micro-controller halted",
    64: "a broken row of its memory could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    110: "a security fault",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "a memory error that it could not recover from",
    143: "it could not be initialised",
}


@dataclass(frozen=True, slots=True)
class DeviceNews:
    """Something that happened to a GPU: an Xid with its number, or a fault that was seen when looking at it."""

    uuid: str
    kind: Literal["xid", "fault", "gone"]
    xid: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class DeviceBad:
    """A device that must not be used any more: told by an agent to the master.

    ``uuids`` are the device's own and those of its slices. ``at``: seconds since the epoch.
    """

    node_rank: int
    uuids: tuple[str, ...]
    why: str
    at: float

    def describe(self) -> str:
        return f"device {self.uuids[0]} on node {self.node_rank} is bad: {self.why}"


@dataclass(slots=True)
class Health:
    """Judges news, and says of each GPU only once that it is bad.

    Args:
        node_rank: the node of the GPUs.
        slices: of each GPU the UUIDs of the devices that are parts of it; itself where it is not divided.
    """

    node_rank: int
    slices: Mapping[str, tuple[str, ...]]
    _uncorrected: dict[str, int] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def hear(self, news: DeviceNews, now: float) -> DeviceBad | None:
        if news.kind == "xid":
            why = BAD_XIDS.get(news.xid, "")
            return self._bad(news.uuid, f"Xid {news.xid}, {why}", now) if why else None
        return self._bad(news.uuid, news.text, now)

    def look(self, gpus: Iterable[GpuFacts], now: float) -> list[DeviceBad]:
        """Judge what NVML shows now. Faults, GPUs that are no longer shown, and errors that ECC could not correct
        and that are new since the first look."""
        shown = {gpu.uuid: gpu for gpu in gpus}
        found: list[DeviceBad | None] = []
        for uuid in self.slices:
            gpu = shown.get(uuid)
            if gpu is None:
                found.append(self._bad(uuid, "NVML does not show it any more", now))
                continue
            before = self._uncorrected.setdefault(uuid, gpu.uncorrected)
            if gpu.fault:
                found.append(self._bad(uuid, gpu.fault, now))
            elif gpu.uncorrected > before:
                new = gpu.uncorrected - before
                found.append(self._bad(uuid, f"{new} memory errors that ECC could not correct", now))
        return [bad for bad in found if bad is not None]

    def _bad(self, uuid: str, why: str, now: float) -> DeviceBad | None:
        if uuid not in self.slices or uuid in self._told:
            return None
        self._told.add(uuid)
        return DeviceBad(self.node_rank, tuple(dict.fromkeys((uuid, *self.slices[uuid]))), why, now)
