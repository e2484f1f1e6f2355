"""What is still free on one node, and how a chunk of members is fitted into it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmesh.placement.demand import WHOLE, Chunk, Slot
from rlmesh.placement.inventory import Device, NodeInfo


@dataclass(frozen=True, slots=True)
class Taken:
    """Where one chunk went: its node, and the devices of each of its slots."""

    node: NodeInfo
    devices: tuple[tuple[Device, ...], ...]

    @property
    def first_device(self) -> int:
        return min((device.index for devices in self.devices for device in devices), default=-1)


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is free on a node. ``free`` goes with ``devices``; ``cpu_milli`` may fall below 0 if ``soft``."""

    node: NodeInfo
    devices: tuple[Device, ...]
    free: tuple[int, ...]
    cpu_milli: int
    memory_bytes: int
    soft: bool
    held: tuple[tuple[str, int], ...] = ()

    @classmethod
    def fresh(cls, node: NodeInfo, *, soft: bool, max_devices: int | None = None) -> NodeState:
        devices = tuple(sorted(node.devices, key=lambda device: device.index))[:max_devices]
        free = (WHOLE,) * len(devices)
        return cls(node, devices, free, node.cpus * WHOLE, node.memory_bytes, soft)

    @property
    def free_milli(self) -> int:
        return sum(self.free)

    @property
    def crowd(self) -> float:
        """How full the node is: cores taken, at least a half per member, over the cores there."""
        cores = max(1, self.node.cpus)
        members = sum(count for _, count in self.held)
        return max(members / 2, cores - self.cpu_milli / WHOLE) / cores

    def likeness(self) -> tuple[object, ...]:
        """Equal for two nodes that are alike for all that may be placed on them later."""
        return (tuple(sorted(self.free)), self.cpu_milli, self.memory_bytes, self.node.cpus, self.held)

    def count(self, role: str) -> int:
        return dict(self.held).get(role, 0)


def place_chunk(chunk: Chunk, state: NodeState) -> tuple[NodeState, Taken] | None:
    """The node after taking ``chunk``, and where it went; ``None`` if it doesn't fit."""
    for role, limit in chunk.limits:
        if state.count(role) + chunk.members(role) > limit:
            return None
    if not state.soft and (chunk.cpu_milli > state.cpu_milli or chunk.memory_bytes > state.memory_bytes):
        return None
    free = list(state.free)
    devices: list[tuple[Device, ...]] = []
    for slot in chunk.slots:
        chosen = _choose_devices(slot, free)
        if chosen is None:
            return None
        for i in chosen:
            free[i] -= slot.share_milli
        devices.append(tuple(state.devices[i] for i in chosen))
    held = dict(state.held)
    for slot in chunk.slots:
        for part in slot.parts:
            held[part.role] = held.get(part.role, 0) + 1
    after = replace(
        state,
        free=tuple(free),
        cpu_milli=state.cpu_milli - chunk.cpu_milli,
        memory_bytes=state.memory_bytes - chunk.memory_bytes,
        held=tuple(sorted(held.items())),
    )
    return after, Taken(state.node, tuple(devices))


def _choose_devices(slot: Slot, free: list[int]) -> list[int] | None:
    """The fullest devices that still have room, lowest index first."""
    fitting = [i for i, room in enumerate(free) if room >= slot.share_milli]
    if len(fitting) < slot.devices:
        return None
    return sorted(sorted(fitting, key=lambda i: (free[i], i))[: slot.devices])
