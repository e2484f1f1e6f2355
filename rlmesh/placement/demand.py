"""What a job asks of its nodes, in whole numbers: thousandths of devices and of cores, bytes of memory.

Shares are integers, so that three roles with a third of a device each ask for exactly one device and ten
shares of 0.1 never ask for more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Literal

from rlmesh.errors import PlacementError

WHOLE = 1000
"""Milli-shares of one device."""

DeviceType = Literal["CPU", "GPU"]


def milli(amount: float) -> int:
    """``amount`` in thousandths, rounded by its decimal spelling: 0.1 is 100, 1/3 is 333."""
    return int((Decimal(str(amount)) * WHOLE).to_integral_value(ROUND_HALF_EVEN))


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """What one role asks.

    Attributes:
        members: number of members in all.
        per_node: elastic roles: exactly so many on each of their nodes; simple roles: at most so many on
            a node; ``None``: any number.
        elastic: whether the members are one process group.
        accelerator_milli: per member; up to 1000 is a share of one device, more must be whole devices.
        cpu_milli: cores per member in thousandths.
        memory_bytes: host memory per member.
    """

    role: str
    members: int = 1
    per_node: int | None = None
    elastic: bool = False
    accelerator_milli: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JobDemand:
    """What a job asks: its roles in the order of their declaration, and the sets of roles that share devices.

    ``max_nodes`` and ``max_devices_per_node`` keep the job on the first nodes, and on the first devices of
    each; ``None`` is no limit.
    """

    roles: tuple[RoleDemand, ...]
    collocations: tuple[tuple[str, ...], ...] = ()
    device_type: DeviceType = "GPU"
    max_nodes: int | None = None
    max_devices_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One member inside a slot, and the share that it gets of each of the slot's devices."""

    role: str
    rank: int
    share_milli: int
    cpu_milli: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Members that share ``devices`` devices: one member, or one of each role of a collocation."""

    parts: tuple[Part, ...]
    devices: int

    @property
    def share_milli(self) -> int:
        """What the slot takes of each of its devices."""
        return sum(part.share_milli for part in self.parts)

    @property
    def cpu_milli(self) -> int:
        return sum(part.cpu_milli for part in self.parts)

    @property
    def memory_bytes(self) -> int:
        return sum(part.memory_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots that must be on one node: the local group of an elastic role, or a single slot.

    ``limits`` says for each role how many of its members one node may hold.
    """

    group: int
    slots: tuple[Slot, ...]
    limits: tuple[tuple[str, int], ...]

    @property
    def device_milli(self) -> int:
        return sum(slot.devices * slot.share_milli for slot in self.slots)

    @property
    def cpu_milli(self) -> int:
        return sum(slot.cpu_milli for slot in self.slots)

    @property
    def memory_bytes(self) -> int:
        return sum(slot.memory_bytes for slot in self.slots)

    def members(self, role: str) -> int:
        return sum(part.role == role for slot in self.slots for part in slot.parts)


def chunks_of(demand: JobDemand) -> tuple[Chunk, ...]:
    """The chunks of a job in the order of declaration.

    Raises:
        PlacementError: a role or a collocation that no cluster could hold; names it.
    """
    groups = _groups(demand)
    return tuple(chunk for number, roles in enumerate(groups) for chunk in _chunks_of_group(number, roles))


def _groups(demand: JobDemand) -> list[list[RoleDemand]]:
    known = {role.role: role for role in demand.roles}
    for names in demand.collocations:
        if missing := [name for name in names if name not in known]:
            raise PlacementError(
                f"collocation {sorted(names)}: the job has no role {', '.join(missing)}; its roles are {sorted(known)}"
            )
    of_role = {name: names for names in demand.collocations for name in names}
    groups: list[list[RoleDemand]] = []
    done: set[str] = set()
    for role in demand.roles:
        if role.role in done:
            continue
        together = set(of_role.get(role.role, (role.role,)))
        groups.append([other for other in demand.roles if other.role in together])
        done |= together
    return groups


def _chunks_of_group(number: int, roles: Sequence[RoleDemand]) -> list[Chunk]:
    devices, shares = _device_shares(roles)
    slots = [
        Slot(
            parts=tuple(
                Part(role.role, rank, shares[role.role], role.cpu_milli, role.memory_bytes)
                for role in roles
                if rank < role.members
            ),
            devices=devices,
        )
        for rank in range(max(role.members for role in roles))
    ]
    limits = tuple((role.role, role.per_node) for role in roles if role.per_node is not None)
    elastic = [role for role in roles if role.elastic]
    sizes = {role.per_node for role in elastic if role.per_node is not None}
    if len(sizes) > 1:
        raise PlacementError(
            "collocated elastic roles must have the same nproc_per_node: "
            + ", ".join(f"{role.role} has {role.per_node}" for role in elastic)
        )
    grouped = max((role.members for role in elastic), default=0)
    size = next(iter(sizes), None) or 1
    chunks = [Chunk(number, tuple(slots[i : i + size]), limits) for i in range(0, grouped, size)]
    return chunks + [Chunk(number, (slot,), limits) for slot in slots[grouped:]]


def _device_shares(roles: Sequence[RoleDemand]) -> tuple[int, dict[str, int]]:
    """Devices per slot, and the exact share of each that every role gets."""
    for role in roles:
        if role.accelerator_milli > WHOLE and role.accelerator_milli % WHOLE:
            raise PlacementError(
                f"role {role.role} asks {role.accelerator_milli / WHOLE:g} accelerators per member: "
                "ask for a share of up to 1, or for whole devices"
            )
    if len(roles) == 1:
        asked = roles[0].accelerator_milli
        return -(-asked // WHOLE), {roles[0].role: min(asked, WHOLE)}
    return _collocated_shares(roles)


def _collocated_shares(roles: Sequence[RoleDemand]) -> tuple[int, dict[str, int]]:
    """Roles with a share of their own keep it; those that ask for a whole device divide the rest exactly."""
    names = ", ".join(role.role for role in roles)
    fixed = {role.role: role.accelerator_milli for role in roles if 0 < role.accelerator_milli < WHOLE}
    open_roles = [role for role in roles if role.role not in fixed]
    counts = {max(1, role.accelerator_milli // WHOLE) for role in open_roles} or {1}
    if len(counts) > 1 or (fixed and counts != {1}):
        asked = ", ".join(f"{role.role} asks {role.accelerator_milli / WHOLE:g}" for role in roles)
        raise PlacementError(f"collocated roles must ask for the same number of devices: {asked}")
    rest = WHOLE - sum(fixed.values())
    if rest < 0 or rest < len(open_roles):
        raise PlacementError(
            f"collocation of {names}: its shares add up to "
            f"{(sum(fixed.values()) + len(open_roles)) / WHOLE:g} of a device at least; 1 is there"
        )
    shares = dict(fixed)
    for i, role in enumerate(open_roles):
        shares[role.role] = rest // len(open_roles) + (i < rest % len(open_roles))
    return counts.pop(), shares
