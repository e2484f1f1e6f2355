"""Which GPUs of a machine a job may use: all of them, less what inherited masks hide. Pure.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: numbers, UUIDs or their beginnings, slices; what comes after the
first entry that names nothing does not count, and an entry that comes twice leaves nothing. NVIDIA_VISIBLE_DEVICES
has been applied already where a container runtime read it; what it says in UUIDs is applied again, which changes
nothing there and is right elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlmesh.placement.inventory import GPU, MIG, Device

CUDA_MASK = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
CONTAINER_MASK = "NVIDIA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """One MIG device: its UUID, memory, and numbers of its GPU instance and compute instance."""

    uuid: str
    memory_bytes: int
    gpu_instance: int = 0
    compute_instance: int = 0


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as the driver shows it.

    Attributes:
        bus_id: PCI address with a domain of 8 digits, such as ``00000000:3B:00.0``.
        minor: number of ``/dev/nvidia<minor>``; None if unknown.
        links: UUID of another GPU and how many NVLinks lead to it.
        mig: whether it is divided; then only its slices can be used.
        fault: why it must not be used; empty if it may.
        uncorrected: ECC errors since the driver was loaded that could not be corrected.
    """

    uuid: str
    bus_id: str = ""
    model: str = ""
    memory_bytes: int = 0
    numa: int | None = None
    minor: int | None = None
    links: tuple[tuple[str, int], ...] = ()
    mig: bool = False
    slices: tuple[SliceFacts, ...] = ()
    fault: str = ""
    uncorrected: int = 0


Choice = tuple[int, int | None]
"""Place of a GPU, and of the slice of it where it is divided."""


def usable_devices(gpus: Sequence[GpuFacts], env: Mapping[str, str]) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The devices that a job may use, and notes on what it may not, for people.

    Devices are in the order of bus ids, the slices of a GPU in its place. Devices with a fault are among them:
    they are not used, and known to be there.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.bus_id.lower())
    notes: list[str] = []
    chosen = set(_everything(ordered))
    if (mask := env.get(CUDA_MASK)) is not None:
        by_bus = env.get(CUDA_ORDER, "").upper() == BY_BUS
        shown, why = cuda_visible(mask, ordered, by_bus=by_bus)
        if why:
            notes.append(f"{CUDA_MASK}={mask}: {why}")
        chosen &= set(shown)
    if (mask := env.get(CONTAINER_MASK)) is not None:
        chosen &= set(_container_visible(mask, ordered))
    devices = [_device(ordered[i], j) for i, j in sorted(chosen, key=lambda c: (c[0], -1 if c[1] is None else c[1]))]
    return tuple(replace(device, index=n) for n, device in enumerate(devices)), tuple(notes)


def _device(gpu: GpuFacts, place: int | None) -> Device:
    if place is None:
        return Device(
            0, gpu.uuid, GPU, gpu.memory_bytes, gpu.bus_id, gpu.numa, gpu.model, links=gpu.links, fault=gpu.fault
        )
    part = gpu.slices[place]
    return Device(0, part.uuid, MIG, part.memory_bytes, gpu.bus_id, gpu.numa, gpu.model, gpu.uuid, (), gpu.fault)


def _everything(gpus: Sequence[GpuFacts]) -> list[Choice]:
    found: list[Choice] = []
    for i, gpu in enumerate(gpus):
        found += [(i, j) for j in range(len(gpu.slices))] if gpu.mig else [(i, None)]
    return found


def cuda_visible(mask: str, gpus: Sequence[GpuFacts], *, by_bus: bool) -> tuple[list[Choice], str]:
    """What CUDA would show under a mask, and why it is nothing where that is surprising.

    Args:
        gpus: in the order of their bus ids.
        by_bus: whether numbers count in that order. Otherwise CUDA counts the fastest first, which is the same
            order where all GPUs are of one model, and unknown where they are not.
    """
    items = mask.split(",")
    found: list[Choice] = []
    numbered = not items[0].startswith(("GPU-", "MIG-"))
    for item in items:
        choice = _by_number(item, gpus) if numbered else _by_name(item, gpus)
        if choice is None:
            break
        if choice in found:
            return [], f"{item} comes twice, and CUDA then shows none"
        found.append(choice)
    if numbered and 0 < len(found) < len(gpus) and not by_bus and len({gpu.model for gpu in gpus}) > 1:
        return [], (
            "it counts GPUs in CUDA's own order, fastest first, and they differ, so that it cannot be known which are "
            f"meant: set {CUDA_ORDER}={BY_BUS}, or name UUIDs"
        )
    return found, ""


def _by_number(item: str, gpus: Sequence[GpuFacts]) -> Choice | None:
    """CUDA reads as many digits as there are; -1, NoDevFiles and the like name nothing."""
    number = re.match(r"\s*[+-]?\d+", item)
    if number is None or not 0 <= (i := int(number[0])) < len(gpus):
        return None
    if not gpus[i].mig:
        return (i, None)
    return (i, 0) if gpus[i].slices else None  # of a divided GPU CUDA shows the first slice


def _by_name(item: str, gpus: Sequence[GpuFacts]) -> Choice | None:
    """A UUID, or the beginning of one if only one begins so, with a digit at least. Digits may be in capitals; CUDA
    wants the prefix as it is, and no space before it."""
    if not item.startswith(("GPU-", "MIG-")) or len(item) == len("GPU-"):
        return None
    text = item.upper()
    if old := re.fullmatch(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", text):
        matching = [
            (i, j)
            for i, gpu in enumerate(gpus)
            for j, part in enumerate(gpu.slices)
            if gpu.uuid.upper().startswith(old[1])
            and (part.gpu_instance, part.compute_instance) == (int(old[2]), int(old[3]))
        ]
        return matching[0] if len(matching) == 1 else None
    names: list[tuple[str, Choice | None]] = []
    for i, gpu in enumerate(gpus):
        names += [(part.uuid, (i, j)) for j, part in enumerate(gpu.slices)]
        names.append((gpu.uuid, (i, None) if not gpu.mig else (i, 0) if gpu.slices else None))
    found = [choice for name, choice in names if name.upper().startswith(text)]
    return found[0] if len(found) == 1 else None


def _container_visible(mask: str, gpus: Sequence[GpuFacts]) -> list[Choice]:
    """What a container's mask leaves. ``none`` hides all. Numbers count the host's GPUs and ``void`` says that
    another mechanism chose them: both tell nothing about what is seen here."""
    items = [item.strip() for item in mask.split(",") if item.strip()]
    if items == ["none"]:
        return []
    if not items or not all(item.upper().startswith(("GPU-", "MIG-")) for item in items):
        return _everything(gpus)
    found: list[Choice] = []
    for item in items:
        for i, gpu in enumerate(gpus):
            if gpu.uuid.upper().startswith(item.upper()):
                found += [(i, j) for j in range(len(gpu.slices))] if gpu.mig else [(i, None)]
            found += [(i, j) for j, part in enumerate(gpu.slices) if part.uuid.upper().startswith(item.upper())]
    return found
