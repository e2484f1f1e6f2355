"""A member's own check that it has the devices and the NUMA node that the plan gave it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh.errors import PlacementError
from rlmesh.placement.binding import Binding, ranges
from rlmesh.placement.machine.affinity import memory_nodes
from rlmesh.placement.machine.environment import mask_disagrees
from rlmesh.placement.machine.gpus import usable_devices
from rlmesh.placement.machine.inventory import VIRTUAL, Device
from rlmesh.placement.machine.system import Machine

__all__ = ["VisibleDevices", "check_devices", "check_torch_devices", "visible_devices"]


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices that a process sees under its mask, and the NUMA nodes of its CPUs and of its memory policy.

    ``unknown`` lists facts that could not be read, with the reason; these prove nothing, and refute nothing.
    """

    devices: tuple[Device, ...] = ()
    numa: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"{d.uuid} ({d.bus_id}, {d.memory_bytes / 2**30:.0f} GiB)" for d in self.devices) or "no GPU"
        return f"{shown}, NUMA {ranges(self.numa)}" if self.numa else shown


def visible_devices(machine: Machine, env: Mapping[str, str]) -> VisibleDevices:
    """Read what this process sees now, through NVML and the kernel; CUDA is not initialised."""
    gpus, notes = machine.gpus()
    devices = usable_devices(gpus, env)[0]
    unknown = list(notes)
    numa = tuple(node.number for node in machine.numa() if node.cpus)
    memory: tuple[int, ...] = ()
    try:
        memory = memory_nodes()
    except OSError as error:
        unknown.append(f"its memory policy: {error.strerror}")
    return VisibleDevices(devices, numa, memory, tuple(unknown))


def check_devices(
    name: str, devices: Sequence[Device], binding: Binding | None, machine: Machine, env: Mapping[str, str]
) -> VisibleDevices | None:
    """Compare what the member called ``name`` sees with the plan.

    Returns:
        What it sees; None if the plan gave it nothing that could be seen.

    Raises:
        PlacementError: it sees something else; the message has both.
    """
    real = [device for device in devices if device.kind != VIRTUAL]
    if not real and binding is None:
        return None
    if wrong := mask_disagrees(devices, env):
        raise PlacementError(f"{name}: {wrong}: the mask has one owner, which is the plan")
    unmasked = Machine(machine.proc, machine.cgroups, machine.dev, machine.sys)
    seen = visible_devices(machine, env) if real else visible_devices(unmasked, {})
    if real:
        _compare_devices(name, real, seen)
    if binding is not None and not set(seen.numa) <= set(binding.numa):
        raise PlacementError(
            f"{name}: the plan gave it {binding}, and its CPUs {ranges(sorted(os.sched_getaffinity(0)))} are of NUMA "
            f"{ranges(seen.numa)}"
        )
    return seen


def _compare_devices(name: str, given: Sequence[Device], visible: VisibleDevices) -> None:
    seen = {device.uuid: device for device in visible.devices}
    wanted = ", ".join(f"{device.uuid} ({device.bus_id})" for device in given)
    if not seen and any("not known" in text for text in visible.unknown):
        return
    there = ", ".join(f"{device.uuid} ({device.bus_id})" for device in visible.devices) or "none"
    if [device.uuid for device in given] != [device.uuid for device in visible.devices]:
        why = f" ({'; '.join(visible.unknown)})" if visible.unknown else ""
        raise PlacementError(f"{name}: the plan gave it {wanted}, and it sees {there}{why}")
    for device in given:
        other = seen[device.uuid]
        if other.fault and not device.fault:
            raise PlacementError(f"{name}: {device.uuid}, which the plan gave it, is bad: {other.fault}")
        known = other.memory_bytes and device.memory_bytes
        if other.bus_id != device.bus_id or (known and other.memory_bytes != device.memory_bytes):
            raise PlacementError(
                f"{name}: the plan gave it {device.uuid} at {device.bus_id} with {device.memory_bytes} bytes, and it "
                f"sees {other.uuid} at {other.bus_id} with {other.memory_bytes} bytes"
            )


def check_torch_devices(name: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """Compare the plan with the devices that torch sees, if torch is loaded and has initialised CUDA already.

    Returns:
        The UUIDs that torch sees; empty if it was not asked.

    Raises:
        PlacementError: torch sees other devices.
    """
    torch = sys.modules.get("torch")
    real = [device.uuid for device in devices if device.kind != VIRTUAL]
    if torch is None or not real or not torch.cuda.is_initialized():
        return ()
    seen = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    wanted = [uuid.partition("-")[2] for uuid in real]
    plain = [uuid.partition("-")[2] if uuid.startswith(("GPU-", "MIG-")) else uuid for uuid in seen]
    if plain != wanted:
        raise PlacementError(f"{name}: the plan gave it {', '.join(real)}, and torch sees {', '.join(seen) or 'none'}")
    return seen
