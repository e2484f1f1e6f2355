"""The GPUs of a machine that a job may use: all, except those hidden by inherited masks or excluded by the user. No
I/O.

`rlmesh.placement.machine.masks` reads the masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlmesh.placement.machine.inventory import GPU, MIG, Device

if TYPE_CHECKING:
    from rlmesh.placement.machine.masks import GpuFacts

CUDA_MASK = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
CONTAINER_MASK = "NVIDIA_VISIBLE_DEVICES"
EXCLUDED = "RLMESH_EXCLUDE_DEVICES"
"""Variable that lists devices that are never used, whatever masks show: UUIDs or their beginnings, bus ids, or numbers
in the order of bus ids, separated by commas."""


def usable_devices(gpus: Sequence[GpuFacts], env: Mapping[str, str]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The devices that a job may use, and notes for people on those that it may not.

    Devices are in the order of CUDA_VISIBLE_DEVICES, or of bus ids if it is not set. The slices of a divided GPU stand
    where the GPU would.
    Devices with a fault, and those that RLMESH_EXCLUDE_DEVICES names, are included with the fault set: they are known
    and not used.
    """
    from rlmesh.placement.machine.masks import all_of, container_visible, cuda_visible, excluded_by

    ordered = sorted(gpus, key=lambda gpu: gpu.bus_id.lower())
    notes: list[str] = []
    chosen = all_of(ordered)
    if (mask := env.get(CUDA_MASK)) is not None:
        by_bus = env.get(CUDA_ORDER, "").upper() == BY_BUS
        chosen, why = cuda_visible(mask, ordered, by_bus=by_bus)
        if why or not chosen:
            notes.append(_hidden(CUDA_MASK, mask, why, len(chosen), len(ordered)))
    if (mask := env.get(CONTAINER_MASK)) is not None:
        left = set(container_visible(mask, ordered))
        if chosen and left.isdisjoint(chosen):
            notes.append(_hidden(CONTAINER_MASK, mask, "", 0, len(ordered)))
        chosen = [choice for choice in chosen if choice in left]
    devices = [_device(ordered[i], j) for i, j in chosen]
    excluded, wrong = excluded_by(env.get(EXCLUDED, ""), devices, ordered)
    if wrong:
        notes.append(f"{EXCLUDED}={env[EXCLUDED]!r}: {wrong}; no GPU of this node is used until that is put right")
        devices = []
    devices = [
        replace(device, index=n, fault=device.fault or (f"{EXCLUDED} names it" if device.uuid in excluded else ""))
        for n, device in enumerate(devices)
    ]
    return tuple(devices), tuple(notes)


def _hidden(name: str, mask: str, why: str, shown: int, there: int) -> str:
    gpus = f"{there} GPU{'s' if there != 1 else ''} {'are' if there != 1 else 'is'} there"
    if not shown:
        return f"no GPU is visible since {name} is {mask!r}" + (f": {why}" if why else "") + f" ({gpus})"
    return f"{name}={mask!r}: {why}: {shown} of the devices count ({gpus})"


def _device(gpu: GpuFacts, place: int | None) -> Device:
    if place is None:
        return Device(
            0, gpu.uuid, GPU, gpu.memory_bytes, gpu.bus_id, gpu.numa, gpu.model, links=gpu.links, fault=gpu.fault
        )
    part = gpu.slices[place]
    return Device(0, part.uuid, MIG, part.memory_bytes, gpu.bus_id, gpu.numa, gpu.model, gpu.uuid, (), gpu.fault)
