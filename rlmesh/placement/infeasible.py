"""The error message for a job that its nodes cannot hold: a table of roles, nodes and missing resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rlmesh.placement.bundles import Bundle, BundleLayout
from rlmesh.placement.demand import WHOLE, JobDemand, RoleDemand
from rlmesh.placement.describe import fold_names
from rlmesh.placement.fleet import Fleet
from rlmesh.placement.machine.inventory import VIRTUAL, NodeInfo
from rlmesh.placement.search import SEARCH_TRIES, PlacedBundle

COLUMNS = 8
"""Most columns of the table; equal nodes share a column."""


def shortage_table(
    demand: JobDemand, layout: BundleLayout, fleet: Fleet, shapes: Sequence[int], pinned: Mapping[int, PlacedBundle], *,
    spares: Sequence[NodeInfo], gave_up: bool,
) -> str:  # fmt: skip
    """Explain why the job does not fit. Roles are placed in the order of declaration, as far as possible.

    Args:
        shapes: shapes of the nodes with the pinned bundles on them.
        pinned: the bundles that stay where they are.
        spares: nodes that are held back.
        gave_up: True if the search ended before it had tried everything.
    """
    return _Table(demand, layout, fleet, shapes, pinned).text(spares, gave_up)


class _Table:
    def __init__(
        self, demand: JobDemand, layout: BundleLayout, fleet: Fleet, shapes: Sequence[int], pinned: Collection[int]
    ) -> None:
        self._demand, self._layout, self._fleet = demand, layout, fleet
        self._unit = "GPU" if demand.device_type == "GPU" else "slot"
        self._shapes = list(shapes)
        self._pinned = pinned

    def text(self, spares: Sequence[NodeInfo], gave_up: bool) -> str:
        rows = self._rows()
        nodes = self._fleet.nodes
        columns = [[row[i] for row in rows] for i in range(2, 2 + len(nodes))]
        names = [node.name for node in nodes]
        folded: dict[tuple[str, ...], list[str]] = {}
        for name, column in zip(names, columns, strict=True):
            folded.setdefault(tuple(column), []).append(name)
        shown = list(folded.items())[:COLUMNS]
        table = [["role", "wants", *(fold_names(of) for _, of in shown), "nodes"]]
        table += [[*row[:2], *(column[i] for column, _ in shown), row[-1]] for i, row in enumerate(rows)]
        lines = ["the cluster cannot hold the job:", *_align(table)]
        if len(folded) > COLUMNS:
            lines.append(f"({len(folded) - COLUMNS} more kinds of nodes are not shown)")
        if gave_up:
            lines.append(f"(there may be a way: the search for one ended after {SEARCH_TRIES} tries)")
        if spares and self._demand.spare_nodes:
            lines.append(f"held back: {', '.join(node.name for node in spares[:COLUMNS])}")
        return "\n".join([*lines, *self._advice()])

    def _rows(self) -> list[list[str]]:
        fleet = self._fleet
        rows = [["(available)", "", *(self._room(i) for i in range(len(fleet.nodes))), str(len(fleet.nodes))]]
        bundles = [bundle for i, bundle in enumerate(self._layout.bundles) if i not in self._pinned]
        for group in sorted({bundle.group for bundle in bundles}):
            of_group = [bundle for bundle in bundles if bundle.group == group]
            before = list(self._shapes)
            placed, short = self._place(of_group)
            keys = {part.key for bundle in of_group for part in bundle.parts}
            roles = [role for role in self._demand.roles if role.key in keys]
            rows += [self._row(role, of_group, before, placed, short) for role in roles]
        return rows

    def _place(self, bundles: Sequence[Bundle]) -> tuple[list[Counter[str]], bool]:
        """Place each bundle on the first node that takes it; return the counts per node, and True if any was left."""
        placed = [Counter[str]() for _ in self._shapes]
        short = False
        full: dict[int, int] = {}
        for bundle in bundles:
            kind = self._fleet.kind(bundle)
            for i in range(full.get(kind, 0), len(self._shapes)):
                if moves := self._fleet.moves(bundle, kind, self._shapes[i]):
                    self._shapes[i] = moves[0].after
                    placed[i].update(part.key for part in bundle.parts)
                    full[kind] = i
                    break
            else:
                full[kind] = len(self._shapes)
                short = True
        return placed, short

    def _row(
        self, role: RoleDemand, bundles: Sequence[Bundle], before: Sequence[int], placed: Sequence[Counter[str]],
        short: bool,
    ) -> list[str]:  # fmt: skip
        own = [bundle for bundle in bundles if bundle.members(role.key)]
        wanted = sum(bundle.members(role.key) for bundle in own)  # pinned members do not count
        row = [role.key, f"{wanted} × ({role.asks(self._unit)})"]
        if not short:
            return [*row, *(f"{count[role.key]} placed" if count[role.key] else "-" for count in placed), ""]
        cells = {shape: self._cell(role, own, wanted, shape) for shape in set(before)}
        row += [cells[shape] for shape in before]
        needed = -(-wanted // role.per_node) if role.per_node else 1
        return [*row, f"{needed} wanted, {len(before)} there" if needed > len(before) else ""]

    def _cell(self, role: RoleDemand, own: Sequence[Bundle], count: int, number: int) -> str:
        """The resources that one node lacks to hold the role, or its part of it."""
        fleet, shape = self._fleet, self._fleet.shapes[number]
        members = min(count, role.per_node or count)
        lacks = []
        wanted, free = members * role.accelerator_milli, sum(shape.free)
        if wanted > free:
            lacks.append(f"{self._unit} {wanted / WHOLE:g} wanted, {free / WHOLE:g} there")
        if not fleet.soft and members * role.cpu_milli > shape.cpu_milli:
            lacks.append(f"CPU {members * role.cpu_milli / WHOLE:g} wanted, {shape.cpu_milli / WHOLE:g} there")
        if not fleet.soft and members * role.memory_bytes > shape.memory_bytes:
            there = f"{shape.memory_bytes / 2**20:.0f} there"
            lacks.append(f"MiB {members * role.memory_bytes / 2**20:.0f} wanted, {there}")
        if own and (blocked := fleet.blocker(own[0], number)):
            lacks.append(blocked)
        if lacks:
            return "; ".join(lacks)
        fitting = 0
        for bundle in own:
            moves = fleet.moves(bundle, fleet.kind(bundle), number)
            if not moves:
                break
            number, fitting = moves[0].after, fitting + bundle.members(role.key)
        return f"room for {fitting} of {count}"

    def _room(self, node: int) -> str:
        free = f"{len(self._fleet.devices[node])} {self._unit}"
        return f"{free}, {self._fleet.nodes[node].cpus} CPU{' (soft)' if self._fleet.soft else ''}"

    def _advice(self) -> list[str]:
        demand = self._demand
        asks = any(role.accelerator_milli for role in demand.roles) or bool(demand.collocations)
        devices = [device for of_node in self._fleet.devices for device in of_node]
        faults = [
            f"node {node.name}: {device.uuid} is not used: {device.fault}"
            for node in self._fleet.nodes
            for device in node.devices
            if device.fault
        ]
        said = [f"node {node.name}: {note}" for node in self._fleet.nodes for note in node.notes][:COLUMNS]
        if demand.device_type == "GPU" and asks and all(device.kind == VIRTUAL for device in devices):
            if devices:
                return ["the devices of this cluster are virtual slots: declare more of them, or ask for less"]
            have = "has a GPU that it may use" if faults or said else "has a GPU"
            return [
                *faults,
                *said,
                f"no node {have}. To run this job without one, build it with device_type('CPU'): "
                "accelerators are then virtual slots, device_per_node of them on each node",
            ]
        return [*faults, *said, "ask for less, or give the job more nodes or devices"]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
