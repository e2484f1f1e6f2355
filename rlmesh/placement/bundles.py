"""Turns a job's demand into bundles, each of which must be on one node. No I/O.

A bundle has slots: sets of devices, and the members that share them. A single member is a bundle of one slot; the
local group of an elastic role has one slot per rank; collocated roles have their members in the same slots; a
pool's part on a node is one slot of many devices, of which each member uses some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlmesh.errors import PlacementError
from rlmesh.placement.demand import WHOLE, JobDemand, Pool, RoleDemand


@dataclass(frozen=True, slots=True)
class MemberShare:
    """One member in a slot, and its share of each of its devices.

    ``first`` and ``count`` select the member's devices among the slot's (``count`` 0: all of them).
    ``process`` is the member whose process a fused member shares; the resources of the process are counted there.
    """

    role: str
    rank: int
    group: str
    share_milli: int
    cpu_milli: int
    memory_bytes: int
    first: int = 0
    count: int = 0
    process: tuple[str, int] | None = None

    @property
    def key(self) -> str:
        return f"{self.role}/{self.group}" if self.group else self.role


@dataclass(frozen=True, slots=True)
class Slot:
    """Members that share ``devices`` devices.

    Attributes:
        share_milli: thousandths that the slot takes of each device: the sum of the members' shares, or all of it.
        only: sets of selectors; of each set at least one selector must name the device.
        labels: labels that a device has once the slot is on it.
        forbids: labels of devices that the slot cannot use.
    """

    parts: tuple[MemberShare, ...]
    devices: int
    share_milli: int
    only: tuple[tuple[str, ...], ...] = ()
    labels: frozenset[str] = frozenset()
    forbids: frozenset[str] = frozenset()

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is equal for slots with the same demand."""
        return (self.devices, self.share_milli, self.only, self.labels, self.forbids)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Slots that must be on one node.

    Attributes:
        group: number of its set of collocated roles.
        adds: labels, each with the number by which its count on the node grows.
        forbids: labels that its node must not have.
        nodes: sets of node names; the node must be in each of them.
    """

    group: int
    slots: tuple[Slot, ...]
    cpu_milli: int
    memory_bytes: int
    adds: tuple[tuple[str, int], ...] = ()
    forbids: tuple[str, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = ()

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for bundles with the same demand."""
        slots = tuple(slot.shape for slot in self.slots)
        return (slots, self.cpu_milli, self.memory_bytes, self.adds, self.forbids, self.nodes)

    @property
    def device_milli(self) -> int:
        return sum(slot.devices * slot.share_milli for slot in self.slots)

    @property
    def parts(self) -> tuple[MemberShare, ...]:
        return tuple(part for slot in self.slots for part in slot.parts)

    def members(self, key: str) -> int:
        return sum(part.key == key for part in self.parts)


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """The bundles of a job in the order of declaration, and the limit of each label per node.

    ``spreads``: the labels of roles that are spread out, each with its number of members; the planner makes their limit
    as low as the cluster allows.
    """

    bundles: tuple[Bundle, ...]
    limits: Mapping[str, int]
    spreads: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Roles whose members share processes: one role, unless some are fused."""

    roles: tuple[RoleDemand, ...]
    members: int
    per_node: int | None
    elastic: bool
    accelerator_milli: int
    cpu_milli: int
    memory_bytes: int
    together: int

    @property
    def name(self) -> str:
        return "+".join(role.key for role in self.roles)

    @property
    def size(self) -> int:
        """Number of members that must be on one node."""
        return self.per_node or self.together if self.elastic else self.together


def layout_of(demand: JobDemand) -> BundleLayout:
    """Turn a demand into bundles.

    Raises:
        PlacementError: no cluster could hold a role, a set of roles or a pool; names it.
    """
    known = {role.key: role for role in demand.roles}
    _check_names(demand, known)
    units = _units(demand, known)
    limits: dict[str, int] = {}
    spreads: dict[str, int] = {}
    separations = _Separations(demand, known)
    bundles: list[Bundle] = []
    for number, group in enumerate(_groups(demand, units)):
        pool = next((p for p in demand.pools if p.name == group[0].roles[0].pool), None)
        pooled = pool is not None and group[0].accelerator_milli > 0
        slots = _pool_slots(pool, group) if pool is not None and pooled else _slots_by_node(group)
        label = f"pool {group[0].roles[0].pool}" if pooled else ""
        if label:
            limits[label] = 1
        for unit in group:
            if unit.per_node is not None and not pooled:
                limits[f"members {unit.name}"] = unit.per_node
        bundles += [_bundle(number, of_node, group, separations, label, limits) for of_node in slots]
    separations.limit(limits, spreads)
    for bundle in bundles:
        _check_bundle(bundle, limits, spreads)
    return BundleLayout(tuple(bundles), limits, spreads)


def expand(keys: Iterable[str], demand: JobDemand) -> tuple[str, ...]:
    """Expand role names: a role with groups stands for all of its groups. Other keys stay."""
    found: list[str] = []
    for key in keys:
        own = [role.key for role in demand.roles if key in (role.key, role.role)]
        found += own or [key]
    return tuple(dict.fromkeys(found))


def _check_names(demand: JobDemand, known: Mapping[str, RoleDemand]) -> None:
    sets = [("collocation", names) for names in demand.collocations]
    sets += [("fusion", names) for names in demand.fusions]
    sets += [("separation", expand(s.keys, demand)) for s in demand.separations]
    for what, names in sets:
        if missing := [name for name in names if name not in known]:
            raise PlacementError(
                f"{what} {sorted(names)}: the job has no role {', '.join(missing)}; its roles are {sorted(known)}"
            )
    pools = {pool.name for pool in demand.pools}
    for role in demand.roles:
        if role.pool and role.pool not in pools:
            raise PlacementError(f"role {role.key}: there is no pool {role.pool}; the pools are {sorted(pools)}")
        if role.accelerator_milli > WHOLE and role.accelerator_milli % WHOLE:
            raise PlacementError(
                f"role {role.key} asks {role.accelerator_milli / WHOLE:g} accelerators per member: "
                "ask for a share of up to 1, or for whole devices"
            )


def _units(demand: JobDemand, known: Mapping[str, RoleDemand]) -> dict[str, _Unit]:
    """The unit of each key; fused roles have the same unit.

    A fused process runs its roles in turns: it needs the most devices and cores that one of them asks for, and
    the memory of all.
    """
    units = {key: _unit((role,)) for key, role in known.items()}
    for names in demand.fusions:
        roles = tuple(role for role in demand.roles if role.key in names)
        counts = {role.members for role in roles}
        if len(counts) > 1:
            asked = ", ".join(f"{role.key} has {role.members}" for role in roles)
            raise PlacementError(f"fused roles must have the same number of members: {asked}")
        units |= dict.fromkeys(names, _unit(roles))
    return units


def _unit(roles: tuple[RoleDemand, ...]) -> _Unit:
    elastic = [role for role in roles if role.elastic]
    sizes = {role.per_node for role in (elastic or roles) if role.per_node is not None}
    if len(sizes) > 1 and elastic:
        raise PlacementError(_different_sizes([(role.key, role.per_node) for role in elastic]))
    return _Unit(
        roles=roles,
        members=roles[0].members,
        per_node=min(sizes, default=None),
        elastic=bool(elastic),
        accelerator_milli=max(role.accelerator_milli for role in roles),
        cpu_milli=max(role.cpu_milli for role in roles),
        memory_bytes=sum(role.memory_bytes for role in roles),
        together=max(role.together for role in roles),
    )


def _groups(demand: JobDemand, units: Mapping[str, _Unit]) -> list[list[_Unit]]:
    """Sets of units that share devices, by collocation or pool."""
    sets = [tuple(names) for names in demand.collocations]
    for pool in demand.pools:
        users = [role.key for role in demand.roles if role.pool == pool.name and role.accelerator_milli]
        for names in sets:
            if clash := [name for name in names if name in users and not set(names) <= set(users)]:
                raise PlacementError(
                    f"role {clash[0]} is in pool {pool.name}, whose roles share devices with each other only, and in "
                    f"the collocation {sorted(names)}"
                )
        sets = [names for names in sets if not set(names) & set(users)] + ([tuple(users)] if users else [])
    of_role = {name: names for names in sets for name in names}
    groups: list[list[_Unit]] = []
    done: set[str] = set()
    for role in demand.roles:
        if role.key in done:
            continue
        together = set(of_role.get(role.key, (role.key,)))
        together |= {other.key for name in list(together) for other in units[name].roles}
        groups.append(list(dict.fromkeys(units[other.key] for other in demand.roles if other.key in together)))
        done |= together
    return groups


def _slots_by_node(group: Sequence[_Unit]) -> list[list[Slot]]:
    """The slots of a group, one list per bundle."""
    devices, shares = _device_shares(group)
    members = max(unit.members for unit in group)
    slots = [
        _slot([part for unit in group if i < unit.members for part in _parts(unit, i, shares[unit.name])], devices)
        for i in range(members)
    ]
    size = _size(group)
    bound = max((unit.members for unit in group if unit.elastic or unit.together > 1), default=0)
    bundles = [slots[i : min(i + size, bound)] for i in range(0, bound, size)]
    return bundles + [[slot] for slot in slots[bound:]]


def _parts(unit: _Unit, index: int, share: int, first: int = 0, count: int = 0) -> list[MemberShare]:
    leader = unit.roles[0]
    at = (leader.role, leader.first_rank + index)
    parts = [
        MemberShare(*at, leader.group, share, unit.cpu_milli, unit.memory_bytes, first, count,
             at if len(unit.roles) > 1 else None)
    ]  # fmt: skip
    parts += [MemberShare(r.role, r.first_rank + index, r.group, 0, 0, 0, first, count, at) for r in unit.roles[1:]]
    return parts


def _slot(parts: Sequence[MemberShare], devices: int) -> Slot:
    return Slot(tuple(parts), devices, sum(part.share_milli for part in parts))


def _size(group: Sequence[_Unit]) -> int:
    """Number of slots of one bundle."""
    for unit in group:
        if unit.members % unit.together:
            raise PlacementError(
                f"role {unit.name}: {unit.members} members cannot be kept together {unit.together} by "
                f"{unit.together}: the number must be a multiple"
            )
        if unit.elastic and unit.per_node and unit.per_node % unit.together:
            raise PlacementError(
                f"role {unit.name}: {unit.per_node} members on a node cannot be kept together {unit.together} by "
                f"{unit.together}"
            )
    elastic = [unit for unit in group if unit.elastic and unit.per_node is not None]
    if len({unit.per_node for unit in elastic}) > 1:
        raise PlacementError(_different_sizes([(unit.name, unit.per_node) for unit in elastic]))
    size = max(unit.size for unit in group)
    if wrong := [unit for unit in group if size % unit.size]:
        sizes = ", ".join(f"{unit.name} {unit.size}" for unit in group)
        raise PlacementError(
            f"collocation of {', '.join(u.name for u in group)}: members that must be on one node are {sizes}, and "
            f"{size} is not a multiple of {wrong[0].size}"
        )
    return size


def _different_sizes(sizes: Iterable[tuple[str, int | None]]) -> str:
    said = ", ".join(f"{name} has {size}" for name, size in sizes)
    return f"collocated elastic roles must have the same nproc_per_node: {said}"


def _device_shares(group: Sequence[_Unit]) -> tuple[int, dict[str, int]]:
    """Number of devices per slot, and each unit's exact share of each device."""
    if len(group) == 1:
        asked = group[0].accelerator_milli
        return -(-asked // WHOLE), {group[0].name: min(asked, WHOLE)}
    counts = {max(1, unit.accelerator_milli // WHOLE) for unit in group if not 0 < unit.accelerator_milli < WHOLE}
    fixed = any(0 < unit.accelerator_milli < WHOLE for unit in group)
    if len(counts) > 1 or (fixed and counts and counts != {1}):
        asked_for = ", ".join(f"{unit.name} asks {unit.accelerator_milli / WHOLE:g}" for unit in group)
        raise PlacementError(f"collocated roles must ask for the same number of devices: {asked_for}")
    return max(counts, default=1), exact_shares(group, f"collocation of {', '.join(unit.name for unit in group)}")


def exact_shares(group: Sequence[_Unit], what: str) -> dict[str, int]:
    """Shares of units in thousandths: fixed shares stay; units that ask for whole devices divide the rest exactly."""
    fixed = {unit.name: unit.accelerator_milli for unit in group if 0 < unit.accelerator_milli < WHOLE}
    rest_of = [unit for unit in group if unit.name not in fixed]
    rest = WHOLE - sum(fixed.values())
    if rest < 0 or rest < len(rest_of):
        raise PlacementError(
            f"{what}: its shares add up to {(sum(fixed.values()) + len(rest_of)) / WHOLE:g} of a device at least; "
            "1 is there"
        )
    shares = dict(fixed)
    for i, unit in enumerate(rest_of):
        shares[unit.name] = rest // len(rest_of) + (i < rest % len(rest_of))
    return shares


def _pool_slots(pool: Pool, group: Sequence[_Unit]) -> list[list[Slot]]:
    """One slot per node of the pool; member i of each role uses the i-th device, or the i-th few devices."""
    shares = exact_shares(group, f"pool {pool.name}")
    total = sum(pool.sizes)
    for unit in group:
        each = max(1, unit.accelerator_milli // WHOLE)
        if unit.members * each > total:
            raise PlacementError(
                f"pool {pool.name} has {total} devices, and role {unit.name} asks for {unit.members} × {each}"
            )
        for size in dict.fromkeys(pool.sizes):
            if size % (each * unit.together):
                raise PlacementError(
                    f"pool {pool.name} has {size} devices on a node, and role {unit.name} needs "
                    f"{each * unit.together} at a time: it must be a multiple"
                )
            if unit.elastic and unit.per_node is not None and unit.per_node * each != size:
                raise PlacementError(
                    f"pool {pool.name} has {size} devices on a node, and role {unit.name} {unit.per_node} members"
                    f" with {each} each: they must be the same"
                )
    slots: list[list[Slot]] = []
    start = 0
    for size in pool.sizes:
        parts: list[MemberShare] = []
        for unit in group:
            each = max(1, unit.accelerator_milli // WHOLE)
            for index in range(start // each, min(unit.members, (start + size) // each)):
                parts += _parts(unit, index, shares[unit.name], index * each - start, each)
        slots.append([Slot(tuple(parts), size, WHOLE)])
        start += size
    return slots


class _Separations:
    """The separations of a job, as labels on nodes and devices."""

    def __init__(self, demand: JobDemand, known: Mapping[str, RoleDemand]) -> None:
        self._sets = [replace(s, keys=expand(s.keys, demand)) for s in demand.separations]
        self._known = known

    def on_devices(self, slot: Slot) -> Slot:
        """The slot with labels for its separations by device."""
        if not slot.devices:
            return slot
        keys = {part.key for part in slot.parts}
        labels: set[str] = set()
        forbids: set[str] = set()
        for number, separation in enumerate(self._sets):
            own = keys & set(separation.keys)
            if separation.by != "device" or not own:
                continue
            if len(own) > 1:
                self._contradiction(own, "device")
            (key,) = own
            labels.add(f"apart {number} {key}")
            others = separation.keys if len(separation.keys) == 1 else set(separation.keys) - own
            forbids |= {f"apart {number} {other}" for other in others}
        return replace(slot, labels=frozenset(labels), forbids=frozenset(forbids)) if labels else slot

    def on_nodes(self, counts: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
        """Labels that a bundle with these member counts adds to its node, and labels that the node must not have."""
        adds: dict[str, int] = {}
        forbids: list[str] = []
        for number, separation in enumerate(self._sets):
            own = [key for key in separation.keys if key in counts]
            if separation.by == "device" or not own:
                continue
            if separation.by == "node" and len(own) > 1:
                self._contradiction(own, "node")
            adds |= {_label(separation.by, number, key): counts[key] for key in own}
            if separation.by == "node":
                forbids += [_label("node", number, key) for key in separation.keys if key != own[0]]
        return adds, forbids

    def limit(self, limits: dict[str, int], spreads: dict[str, int]) -> None:
        for number, separation in enumerate(self._sets):
            for key in separation.keys:
                label = _label(separation.by, number, key)
                if separation.by == "spread":
                    spreads[label] = self._known[key].members
                elif separation.by == "node" and len(separation.keys) == 1:
                    limits[label] = 1

    def _contradiction(self, keys: Iterable[str], by: str) -> None:
        raise PlacementError(
            f"roles {', '.join(sorted(keys))} are to share devices, and to be kept apart by {by}: drop one of the two"
        )


def _label(by: str, number: int, key: str) -> str:
    return f"{by} {number} {key}"


def _bundle(
    number: int,
    slots: Sequence[Slot],
    group: Sequence[_Unit],
    separations: _Separations,
    pool: str,
    limits: Mapping[str, int],
) -> Bundle:
    labelled = [slot if pool else separations.on_devices(slot) for slot in slots]
    roles = {role.key: role for unit in group for role in unit.roles}
    parts = [part for slot in slots for part in slot.parts]
    counts = Counter(part.key for part in parts)
    adds, forbids = separations.on_nodes(counts)
    if pool:
        adds[pool] = 1
    for unit in group:
        if (label := f"members {unit.name}") in limits and unit.roles[0].key in counts:
            adds[label] = counts[unit.roles[0].key]
    only = tuple(dict.fromkeys(roles[key].devices for key in counts if roles[key].devices))
    return Bundle(
        number,
        tuple(replace(slot, only=only) for slot in labelled) if only else tuple(labelled),
        sum(part.cpu_milli for part in parts),
        sum(part.memory_bytes for part in parts),
        tuple(sorted(adds.items())),
        tuple(sorted(forbids)),
        tuple(dict.fromkeys(roles[key].nodes for key in counts if roles[key].nodes)),
    )


def _check_bundle(bundle: Bundle, limits: Mapping[str, int], spreads: Mapping[str, int]) -> None:
    """Refuse a bundle that breaks a limit by itself, since it fits nowhere."""
    for label, count in bundle.adds:
        if label in limits and label not in spreads and count > limits[label]:
            names = ", ".join(dict.fromkeys(part.key for part in bundle.parts))
            raise PlacementError(
                f"{names}: {count} members must be on one node, and at most {limits[label]} may be: drop the "
                "separation by node, or per_node"
            )
