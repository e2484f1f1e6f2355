"""A job's demand on its nodes, in whole numbers: thousandths of devices and of cores, bytes of memory.

Shares are integers, so that three roles with a third of a device each ask for exactly one device and ten
shares of 0.1 never ask for more than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Literal

WHOLE = 1000
"""Milli-shares of one device."""

DeviceType = Literal["CPU", "GPU"]
Apart = Literal["device", "node", "spread"]


def milli(amount: float) -> int:
    """Convert to thousandths, rounded by the decimal spelling: 0.1 is 100, 1/3 is 333."""
    return int((Decimal(str(amount)) * WHOLE).to_integral_value(ROUND_HALF_EVEN))


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """The demand of one role, or of one group of a role that has several.

    Attributes:
        members: number of members in all.
        per_node: elastic roles: exactly this many on each of their nodes; simple roles: at most this many on
            a node; ``None``: any number.
        elastic: True if the members are one process group.
        accelerator_milli: thousandths of a device per member; up to 1000 is a share of one device, more must be whole
            devices.
        cpu_milli: cores per member in thousandths.
        memory_bytes: host memory per member.
        group: name of the group within the role; empty if the role has none.
        first_rank: rank of the first member, above 0 in the later groups of a role.
        together: this many consecutive members are always on one node, on devices close to each other.
        nodes: names of the only nodes that it may run on; empty: any.
        devices: the only devices that it may use, by UUID or its beginning, kind or model; empty: any.
        pool: the pool whose devices it uses.
    """

    role: str
    members: int = 1
    per_node: int | None = None
    elastic: bool = False
    accelerator_milli: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0
    group: str = ""
    first_rank: int = 0
    together: int = 1
    nodes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    pool: str = ""

    @property
    def key(self) -> str:
        """``ROLE`` or ``ROLE/group``, as collocations and separations name it."""
        return f"{self.role}/{self.group}" if self.group else self.role

    def asks(self, unit: str) -> str:
        """The demand of one member, for people."""
        wants = [f"{self.accelerator_milli / WHOLE:g} {unit}"] if self.accelerator_milli else []
        wants += [f"{self.cpu_milli / WHOLE:g} CPU"] if self.cpu_milli else []
        wants += [f"{self.memory_bytes / 2**20:.0f} MiB"] if self.memory_bytes else []
        return ", ".join(wants) or "nothing"


@dataclass(frozen=True, slots=True)
class Separation:
    """Roles (or groups of roles) that are kept apart.

    ``device``: no two of them share a device. ``node``: no node holds two of them. With a single
    key this holds between its own members. ``spread``: the members of each are divided among as many nodes
    as the cluster allows.
    """

    keys: tuple[str, ...]
    by: Apart = "device"


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices reserved for the roles of the pool: ``sizes[i]`` of them on the i-th of its nodes."""

    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobDemand:
    """A job's demand: its roles in the order of declaration, and relations between them.

    Attributes:
        collocations: sets of roles whose members share devices, rank by rank.
        separations: sets of roles that are kept apart.
        fusions: sets of roles whose members share processes, rank by rank.
        pools: divisions of the devices; roles name theirs.
        max_nodes, max_devices_per_node: limits on the number of nodes, and on the first devices of each;
            ``None`` is no limit.
        spare_nodes: number of nodes that stay empty, to replace others.
    """

    roles: tuple[RoleDemand, ...]
    collocations: tuple[tuple[str, ...], ...] = ()
    device_type: DeviceType = "GPU"
    max_nodes: int | None = None
    max_devices_per_node: int | None = None
    separations: tuple[Separation, ...] = ()
    fusions: tuple[tuple[str, ...], ...] = ()
    pools: tuple[Pool, ...] = ()
    spare_nodes: int = 0

    def sharing(self, key: str) -> tuple[str, ...]:
        """Roles whose members share devices with those of a role or group, itself included; may be empty."""
        found = next((names for names in self.collocations if key in names), ())
        pool = next((role.pool for role in self.roles if role.key == key and role.accelerator_milli), "")
        if pool:
            found = tuple(r.key for r in self.roles if r.pool == pool and r.accelerator_milli)
        roles = tuple(dict.fromkeys(name.partition("/")[0] for name in found))
        return roles if len(found) > 1 else ()
