"""Places the members of a job on nodes and devices. No I/O: the same job and nodes give the same plan.

Rules:

* A member of a simple role goes to any node, at most ``per_node`` members of its role to one. An elastic role has
  exactly ``nproc_per_node`` members on each of ``nnodes`` nodes. Members that must be together are on one node.
* A device is shared in thousandths, never beyond 1000. Collocated roles share devices: member i of
  each is on the same device. Roles with a fixed share keep it, the others divide the rest exactly.
* Separated roles share no device, or no node. The devices of a pool are for its roles only.
* ``cpu`` and ``memory`` are limits if the job asks for real accelerators. If the device type is CPU,
  or all devices are virtual, they are soft: they balance the nodes and are noted when exceeded, but never
  refuse a job, since such a job is often a cluster's job that is tried out on a laptop.
* A member with several devices gets devices that are close to each other, and CPUs next to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rlmesh.errors import PlacementError
from rlmesh.placement.binding import Binding, binding_for
from rlmesh.placement.bundles import Bundle, BundleLayout, layout_of
from rlmesh.placement.demand import WHOLE, JobDemand
from rlmesh.placement.fleet import Fleet
from rlmesh.placement.machine.inventory import VIRTUAL, Device, NodeInfo
from rlmesh.placement.pinned import PinnedBundles
from rlmesh.placement.plan import DeviceShare as DeviceShare
from rlmesh.placement.plan import Placement as Placement
from rlmesh.placement.plan import Plan as Plan
from rlmesh.placement.search import PlacedBundle, SearchResult, find_places

SPREAD_STEPS = 8
"""Number of times that the limit of a spread role is raised by one before it is dropped."""


def make_plan(
    demand: JobDemand,
    nodes: Sequence[NodeInfo],
    *,
    pinned: Sequence[Placement] = (),
    excluded_nodes: Collection[int] = (),
    excluded_devices: Collection[str] = (),
    spare_nodes: int | None = None,
) -> Plan:
    """Place every member of ``demand`` on ``nodes``.

    Args:
        pinned: members that stay where they are; the others are placed around them.
        excluded_nodes: numbers of nodes that must not be used.
        excluded_devices: UUIDs of devices that must not be used.
        spare_nodes: number of nodes that stay empty; ``None``: the number in the demand.

    Raises:
        PlacementError: the nodes cannot hold the job; the message has a table of roles, nodes and missing
            resources (wanted, there).
    """
    layout = layout_of(demand)
    ordered = sorted(nodes, key=lambda node: node.node_rank)
    usable, spares = _usable(demand, ordered, pinned, set(excluded_nodes), spare_nodes)
    if not usable:
        raise PlacementError("there is no node to place the job on")
    bad = set(excluded_devices)
    devices = [
        [d for d in sorted(node.devices, key=lambda d: d.index) if not d.fault and d.uuid not in bad][
            : demand.max_devices_per_node
        ]
        for node in usable
    ]
    there = PinnedBundles(layout.bundles, pinned)
    layout = BundleLayout(there.bundles, layout.limits, layout.spreads)
    fleet = Fleet(usable, devices, layout, soft=_is_soft(demand, devices))
    shapes, taken = there.take_places(fleet)
    found = _place(fleet, layout, {i: c for i, c in enumerate(layout.bundles) if i not in taken}, shapes)
    if found.taken is None:
        from rlmesh.placement.infeasible import shortage_table

        _refuse_unknown_nodes(demand, ordered)
        raise PlacementError(shortage_table(demand, layout, fleet, shapes, taken, spares=spares, gave_up=found.gave_up))
    placed = {**taken, **_in_node_order(layout.bundles, found.taken, fleet)}
    placements = _placements(demand, there.whole, there.join(placed), fleet)
    return Plan(placements, usable, _notes(placements, usable, devices), spares)


def _usable(
    demand: JobDemand, ordered: Sequence[NodeInfo], pinned: Sequence[Placement], excluded: set[int], spare: int | None
) -> tuple[tuple[NodeInfo, ...], tuple[NodeInfo, ...]]:
    """The nodes to plan with, and the nodes held back. Nodes in use come first, then those of lowest number."""
    in_use = {placement.node_rank for placement in pinned}
    there = [node for node in ordered if node.node_rank not in excluded]
    there.sort(key=lambda node: (node.node_rank not in in_use, node.node_rank))
    count = demand.spare_nodes if spare is None else spare
    last = max(len(in_use), len(there) - count, 0)
    limit = last if demand.max_nodes is None else max(len(in_use), min(last, demand.max_nodes))
    usable = sorted(there[:limit], key=lambda node: node.node_rank)
    spares = sorted(there[limit:], key=lambda node: node.node_rank)
    return tuple(usable), tuple(spares)


def _is_soft(demand: JobDemand, devices: Sequence[Sequence[Device]]) -> bool:
    if demand.device_type == "CPU":
        return True
    kinds = {device.kind for of_node in devices for device in of_node}
    return kinds == {VIRTUAL}


def _refuse_unknown_nodes(demand: JobDemand, nodes: Sequence[NodeInfo]) -> None:
    known = [node.name for node in nodes]
    for role in demand.roles:
        if missing := [name for name in role.nodes if name not in known]:
            raise PlacementError(
                f"role {role.key} is bound to node {', '.join(missing)}, which the cluster does not have; its nodes "
                f"are {', '.join(known[:20])}{' …' if len(known) > 20 else ''}"
            )


def _place(fleet: Fleet, layout: BundleLayout, bundles: Mapping[int, Bundle], shapes: Sequence[int]) -> SearchResult:
    """Place the bundles; spread roles as evenly as possible first, then less evenly."""
    if not bundles:
        return SearchResult({})
    if not layout.spreads:
        return find_places(fleet, bundles, shapes)
    own = Counter[str]()
    for bundle in layout.bundles:
        for label, count in bundle.adds:
            own[label] = max(own[label], count)
    even = {label: max(own[label], -(-members // len(fleet.nodes))) for label, members in layout.spreads.items()}
    found = SearchResult(None)
    for step in range(SPREAD_STEPS + 1):
        for label, members in layout.spreads.items():
            fleet.limits[label] = members if step == SPREAD_STEPS else min(members, even[label] + step)
        fleet.forget_moves()
        found = find_places(fleet, bundles, shapes)
        if found.taken is not None or all(fleet.limits[label] == n for label, n in layout.spreads.items()):
            return found
    return found


def _in_node_order(
    bundles: Sequence[Bundle], taken: Mapping[int, PlacedBundle], fleet: Fleet
) -> dict[int, PlacedBundle]:
    """Give lower ranks to lower nodes and devices, among bundles of a group with the same demand."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index in sorted(taken):
        bundle = bundles[index]
        roles = tuple(tuple(part.key for part in slot.parts) for slot in bundle.slots)
        alike.setdefault((bundle.group, fleet.kind(bundle), roles), []).append(index)
    result: dict[int, PlacedBundle] = {}
    for indexes in alike.values():
        places = sorted((taken[i] for i in indexes), key=lambda t: (t.node, min(map(min, filter(None, t.devices)),
                                                                               default=-1)))  # fmt: skip
        result.update(zip(indexes, places, strict=True))
    return result


def _placements(
    demand: JobDemand, bundles: Sequence[Bundle], taken: Mapping[int, PlacedBundle], fleet: Fleet
) -> tuple[Placement, ...]:
    found: dict[tuple[str, int], Placement] = {}
    bindings: dict[tuple[int, tuple[int, ...]], Binding | None] = {}
    for index, bundle in enumerate(bundles):
        at = taken[index]
        node = fleet.nodes[at.node]
        for slot, positions in zip(bundle.slots, at.devices, strict=True):
            for part in slot.parts:
                own = positions[part.first : part.first + part.count] if part.count else positions
                devices = [fleet.devices[at.node][i] for i in own]
                if (at.node, own) not in bindings:
                    bindings[at.node, own] = binding_for(node, devices)
                found[part.role, part.rank] = Placement(
                    part.role, part.rank, node.node_rank, 0, 0, 0, 0,
                    tuple(DeviceShare(device, part.share_milli) for device in devices),
                    part.cpu_milli, part.memory_bytes, part.group, part.process, bindings[at.node, own],
                )  # fmt: skip
    result: list[Placement] = []
    for role in dict.fromkeys(role.role for role in demand.roles):
        count = sum(each.members for each in demand.roles if each.role == role)
        result += _numbered([found[role, rank] for rank in range(count)])
    return tuple(result)


def _numbered(placements: Sequence[Placement]) -> list[Placement]:
    """The members of one role by rank, with their local ranks and group ranks."""
    sizes = Counter(placement.node_rank for placement in placements)
    order = {node_rank: i for i, node_rank in enumerate(sizes)}  # by the lowest rank on each, as torchrun does
    so_far = Counter[int]()
    result = []
    for p in placements:
        result.append(
            Placement(
                p.role, p.rank, p.node_rank, so_far[p.node_rank], sizes[p.node_rank], order[p.node_rank], len(sizes),
                p.devices, p.cpu_milli, p.memory_bytes, p.group, p.process, p.binding,
            )
        )  # fmt: skip
        so_far[p.node_rank] += 1
    return result


def _notes(
    placements: Sequence[Placement], nodes: Sequence[NodeInfo], devices: Sequence[Sequence[Device]]
) -> tuple[str, ...]:
    cpu, memory = Counter[int](), Counter[int]()
    for placement in placements:
        cpu[placement.node_rank] += placement.cpu_milli
        memory[placement.node_rank] += placement.memory_bytes
    notes = []
    for node, used in zip(nodes, devices, strict=True):
        if cpu[node.node_rank] > node.cpus * WHOLE:
            asked = f"{cpu[node.node_rank] / WHOLE:g} cores asked, {node.cpus} there"
            notes.append(f"node {node.name}: {asked}; its members share them")
        if memory[node.node_rank] > node.memory_bytes:
            asked = f"{memory[node.node_rank] / 2**20:.0f} MiB asked, {node.memory_bytes / 2**20:.0f} there"
            notes.append(f"node {node.name}: {asked}")
        usable = {device.uuid for device in used}
        notes += [f"node {node.name}: {d.uuid} is not used: {d.fault}" for d in node.devices
                  if d.fault and d.uuid not in usable]  # fmt: skip
    return tuple(notes)
