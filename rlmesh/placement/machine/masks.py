"""CUDA_VISIBLE_DEVICES and similar masks of a machine's GPUs. No I/O.

CUDA_VISIBLE_DEVICES is read as CUDA reads it: numbers, UUIDs or their beginnings, slices, in that order. Entries after
the first invalid one are ignored, and an entry that comes twice hides all devices.
A container runtime applies NVIDIA_VISIBLE_DEVICES itself. UUIDs in it are applied again, which changes nothing in a
container and is right elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlmesh.placement.machine.inventory import Device

__all__ = ["Choice", "GpuFacts", "SliceFacts", "all_of", "container_visible", "cuda_visible", "excluded_by"]


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
        links: pairs of another GPU's UUID and the number of NVLinks to it.
        mig: True if it is divided; then only its slices can be used.
        fault: why it must not be used; empty if it may.
        uncorrected: uncorrectable ECC errors since the driver was loaded.
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
"""Position of a GPU, and of the slice if it is divided."""
Named = tuple[Choice | None, str]
"""The device that an entry names; or None with the reason, which is empty for entries that are meant to hide
devices."""

_UUIDS = ("GPU-", "MIG-")
_DIGITS = 32
"""Hexadecimal digits of a UUID."""
_NONE = ("", "-1", "none", "NoDevFiles")
"""First entries that are meant to hide all devices."""


def all_of(gpus: Sequence[GpuFacts]) -> list[Choice]:
    """All devices, the slices of a GPU in its place."""
    found: list[Choice] = []
    for i, gpu in enumerate(gpus):
        found += [(i, j) for j in range(len(gpu.slices))] if gpu.mig else [(i, None)]
    return found


def cuda_visible(mask: str, gpus: Sequence[GpuFacts], *, by_bus: bool) -> tuple[list[Choice], str]:
    """The devices that CUDA shows under a mask, in its order, and what is wrong with the mask, quoting the entry.

    Args:
        gpus: in the order of their bus ids.
        by_bus: True if numbers count in that order. Otherwise CUDA counts the fastest first, which is the same
            order if all GPUs are of one model, and unknown if not.
    """
    items = mask.split(",")
    found: list[Choice] = []
    why = ""
    numbered = not items[0].startswith(_UUIDS)
    for at, item in enumerate(items):
        choice, why = _by_number(item, gpus, first=at == 0) if numbered else _by_name(item, gpus)
        if choice is None:
            break
        if choice in found:
            return [], f"{item!r} names a device for the second time, and CUDA then shows none"
        found.append(choice)
    if why:
        left = len(items) - len(found) - 1
        why = f"{why}, and CUDA reads no further" if left else why
    if numbered and found and not by_bus and len({gpu.model for gpu in gpus}) > 1:
        if len(found) < len(gpus):
            return [], (
                "it counts GPUs in CUDA's own order, fastest first, and they differ, so that it cannot be known which "
                "are meant: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"
            )
        found.sort()  # all of them, in an unknown order
    return found, why


def _by_number(item: str, gpus: Sequence[GpuFacts], *, first: bool) -> Named:
    """Parse as CUDA does: as many digits as there are, by C's ``strtoull``, of which 32 bits are used."""
    number = re.match(r"\s*([+-]?)(\d+)", item, re.ASCII)
    if number is None:
        if item.strip() in _NONE:
            return None, ""
        if item.strip().upper().startswith(_UUIDS):
            wrong = "a UUID in a list of numbers" if not first else "not read as a UUID: it begins with GPU- or MIG-, "
            return None, f"{item!r} is {wrong}" + ("in capitals and without a space before it" if first else "")
        return None, f"{item!r} is neither a number nor a UUID"
    i = _c_int(number[1] == "-", number[2])
    if i < 0:
        return None, ""  # -1 ends a list
    if i >= len(gpus):
        return None, f"{item!r} names no GPU: they are {_range(len(gpus))}"
    if not gpus[i].mig:
        return (i, None), ""
    if not gpus[i].slices:
        return None, f"{item!r} is a GPU that is divided and has no slices"
    return (i, 0), ""  # CUDA shows the first slice of a divided GPU


def _c_int(minus: bool, digits: str) -> int:
    value = int(digits.lstrip("0") or "0") if len(digits.lstrip("0")) <= 20 else 2**64
    low = (2**64 - 1 if value >= 2**64 else -value if minus else value) & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def _range(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def _by_name(item: str, gpus: Sequence[GpuFacts]) -> Named:
    """Parse a UUID or an unambiguous beginning of one with at least one digit. Digits may be in capitals, and dashes
    anywhere. As in CUDA the prefix must be exact without a space before it, and text after all digits is ignored."""
    if not item.startswith(_UUIDS):
        if item.strip() in _NONE:
            return None, ""
        return None, f"{item!r} is not a UUID in a list of UUIDs: they begin with GPU- or MIG-, without a space before"
    if not _digits(item):
        return None, f"{item!r} has no digit of a UUID"
    if old := re.fullmatch(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", item, re.ASCII):
        matching = [
            (i, j)
            for i, gpu in enumerate(gpus)
            for j, part in enumerate(gpu.slices)
            if _begins(old[1], gpu.uuid) and (part.gpu_instance, part.compute_instance) == (int(old[2]), int(old[3]))
        ]
        return _only(item, [(gpus[i].slices[j].uuid, (i, j)) for i, j in matching])
    names: list[tuple[str, Choice | None]] = []
    for i, gpu in enumerate(gpus):
        names += [(part.uuid, (i, j)) for j, part in enumerate(gpu.slices)]
        names.append((gpu.uuid, (i, None) if not gpu.mig else (i, 0) if gpu.slices else None))
    return _only(item, [(name, choice) for name, choice in names if _begins(item, name)])


def _digits(uuid: str) -> str:
    return uuid[len("GPU-") :].replace("-", "").lower()[:_DIGITS]


def _begins(item: str, uuid: str) -> bool:
    """True if a UUID begins as an entry says; CUDA skips dashes."""
    return uuid[:4].upper() == item[:4] and _digits(uuid).startswith(_digits(item))


def _only(item: str, matching: Sequence[tuple[str, Choice | None]]) -> Named:
    if not matching:
        return None, f"{item!r} begins no UUID of this machine's devices"
    if len(matching) > 1:
        return None, f"{item!r} begins the UUIDs of several devices ({', '.join(name for name, _ in matching)})"
    choice = matching[0][1]
    return choice, "" if choice is not None else f"{item!r} is a GPU that is divided and has no slices"


def container_visible(mask: str, gpus: Sequence[GpuFacts]) -> list[Choice]:
    """The devices that a container's mask leaves. ``none`` hides all. Numbers count the host's GPUs, and ``void`` means
    that another mechanism chose them: both say nothing about the GPUs seen here."""
    items = [item.strip() for item in mask.split(",") if item.strip()]
    if items == ["none"]:
        return []
    if not items or not all(item.upper().startswith(_UUIDS) for item in items):
        return all_of(gpus)
    found: list[Choice] = []
    for item in items:
        for i, gpu in enumerate(gpus):
            if gpu.uuid.upper().startswith(item.upper()):
                found += [(i, j) for j in range(len(gpu.slices))] if gpu.mig else [(i, None)]
            found += [(i, j) for j, part in enumerate(gpu.slices) if part.uuid.upper().startswith(item.upper())]
    return found


def excluded_by(text: str, devices: Iterable[Device], gpus: Sequence[GpuFacts]) -> tuple[frozenset[str], str]:
    """UUIDs of the ``devices`` that an exclusion list names, and what is wrong with the list.

    A well-formed entry that names nothing here is valid: the list may be one for all nodes. The beginning of
    a UUID names all UUIDs that begin so, and a GPU names all of its slices. Numbers count ``gpus``, all GPUs of the
    machine in the order of bus ids. Spaces around entries and capitals do not matter.
    """
    found: set[str] = set()
    devices = list(devices)
    for item in filter(None, (item.strip().lower() for item in text.split(","))):
        if re.fullmatch(r"(gpu|mig)-[0-9a-z/-]+", item):
            found |= {d.uuid for d in devices if any(u.lower().startswith(item) for u in (d.uuid, d.parent))}
        elif re.fullmatch(r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(\.[0-9a-f])?", item):
            found |= {d.uuid for d in devices if _bus(d.bus_id.lower()) == _bus(item)}
        elif re.fullmatch(r"\d+", item, re.ASCII):
            named = {gpu.uuid for gpu in gpus[int(item) : int(item) + 1]}
            found |= {d.uuid for d in devices if named & {d.uuid, d.parent}}
        else:
            return frozenset(), f"{item!r} is not a UUID (GPU-…, MIG-…), a bus id (0000:3b:00.0) or a number"
    return frozenset(found), ""


def _bus(text: str) -> str:
    """A bus id with an 8-digit domain and a function."""
    text = text if text.count(":") == 2 else f"0:{text}"
    domain, _, rest = text.partition(":")
    return f"{domain:0>8}:{rest if '.' in rest else f'{rest}.0'}"
