"""The CPUs and NUMA nodes next to a member's devices. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmesh.placement.machine.inventory import Device, NodeInfo


@dataclass(frozen=True, slots=True)
class Binding:
    """The CPUs for a member's threads, by number, and the NUMA nodes of these CPUs for its memory.

    Members on the same NUMA node share its CPUs: the kernel divides them better than a plan can.
    """

    cpus: tuple[int, ...]
    numa: tuple[int, ...]

    def __str__(self) -> str:
        return f"NUMA {ranges(self.numa)} (CPUs {ranges(self.cpus)})"


def binding_for(node: NodeInfo, devices: Sequence[Device]) -> Binding | None:
    """The binding of a member with these devices; None without devices, or if all CPUs are equally near."""
    if len(node.numa) < 2 or not devices or any(device.numa is None for device in devices):
        return None
    near = {device.numa for device in devices}
    chosen = [numa for numa in node.numa if numa.number in near and numa.cpus]
    if len(chosen) < len(near) or len(chosen) == len([numa for numa in node.numa if numa.cpus]):
        return None  # this process may not use the CPUs there, or all CPUs that it may use are there
    cpus = sorted(cpu for numa in chosen for cpu in numa.cpus)
    return Binding(tuple(cpus), tuple(sorted(numa.number for numa in chosen)))


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as the kernel writes lists: ``0-3,8``."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 < len(ordered) and ordered[i + 1] == number + 1:
            continue
        first = ordered[start]
        parts.append(f"{first}" if first == number else f"{first}-{number}")
        start = i + 1
    return ",".join(parts)
