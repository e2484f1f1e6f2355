"""The plan of a job: the place and devices of each member. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from rlmesh.placement.binding import Binding
from rlmesh.placement.machine.inventory import Device, NodeInfo


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device and the thousandths of it that a member has."""

    device: Device
    milli: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one member.

    Attributes:
        group_rank: number of its node among the nodes of its role, as torchrun's GROUP_RANK.
        cpu_milli, memory_bytes: its demand; of fused members the first one has all of it.
        group: name of its group within the role.
        process: the member in whose process it runs, if roles are fused.
        binding: the CPUs next to its devices; None if it may use all CPUs of the node.
    """

    role: str
    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    devices: tuple[DeviceShare, ...]
    cpu_milli: int
    memory_bytes: int
    group: str = ""
    process: tuple[str, int] | None = None
    binding: Binding | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The places of all members of a job by role and rank; ``notes`` lists demands beyond what the nodes have."""

    placements: tuple[Placement, ...]
    nodes: tuple[NodeInfo, ...]
    notes: tuple[str, ...] = ()
    spares: tuple[NodeInfo, ...] = ()

    def of(self, role: str) -> tuple[Placement, ...]:
        """The members of a role by rank."""
        return tuple(placement for placement in self.placements if placement.role == role)

    def on(self, node_rank: int) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if placement.node_rank == node_rank)
