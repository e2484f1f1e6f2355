"""The message for a job that its nodes cannot hold: a table of role × node and what is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rlmesh.placement.bundles import BundleLayout, Chunk
from rlmesh.placement.demand import WHOLE, JobDemand, RoleDemand
from rlmesh.placement.fleet import Fleet
from rlmesh.placement.machine.inventory import VIRTUAL, NodeInfo
from rlmesh.placement.search import SEARCH_TRIES, PlacedBundle

COLUMNS = 8
"""Most nodes that the table tells apart; of those that look the same it has one."""


def shortage_table(
    demand: JobDemand, layout: BundleLayout, fleet: Fleet, shapes: Sequence[int], kept: Mapping[int, PlacedBundle], *,
    spares: Sequence[NodeInfo], gave_up: bool,
) -> str:  # fmt: skip
    """Explain why the job doesn't fit. Roles are placed in the order of declaration, as far as they go.

    Args:
        shapes: of the nodes with what is kept on them.
        kept: the chunks that stay where they are.
        spares: nodes that are held back.
        gave_up: the search ended before it had tried everything.
    """
    return _Table(demand, layout, fleet, shapes, kept).text(spares, gave_up)


class _Table:
    def __init__(
        self, demand: JobDemand, layout: BundleLayout, fleet: Fleet, shapes: Sequence[int], kept: Collection[int]
    ) -> None:
        self._demand, self._layout, self._fleet = demand, layout, fleet
        self._unit = "GPU" if demand.device_type == "GPU" else "slot"
        self._shapes = list(shapes)
        self._kept = kept

    def text(self, spares: Sequence[NodeInfo], gave_up: bool) -> str:
        rows = self._rows()
        nodes = self._fleet.nodes
        columns = [[row[i] for row in rows] for i in range(2, 2 + len(nodes))]
        names = [node.name for node in nodes]
        folded: dict[tuple[str, ...], list[str]] = {}
        for name, column in zip(names, columns, strict=True):
            folded.setdefault(tuple(column), []).append(name)
        shown = list(folded.items())[:COLUMNS]
        table = [["role", "wants", *(_names(of) for _, of in shown), "nodes"]]
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
        rows = [["(there)", "", *(self._room(i) for i in range(len(fleet.nodes))), str(len(fleet.nodes))]]
        chunks = [chunk for i, chunk in enumerate(self._layout.chunks) if i not in self._kept]
        for group in sorted({chunk.group for chunk in chunks}):
            of_group = [chunk for chunk in chunks if chunk.group == group]
            before = list(self._shapes)
            placed, short = self._place(of_group)
            keys = {part.key for chunk in of_group for part in chunk.parts}
            roles = [role for role in self._demand.roles if role.key in keys]
            rows += [self._row(role, of_group, before, placed, short) for role in roles]
        return rows

    def _place(self, chunks: Sequence[Chunk]) -> tuple[list[Counter[str]], bool]:
        """Place chunks on the first node that takes them; who went where, and whether some went nowhere."""
        placed = [Counter[str]() for _ in self._shapes]
        short = False
        full: dict[int, int] = {}
        for chunk in chunks:
            kind = self._fleet.kind(chunk)
            for i in range(full.get(kind, 0), len(self._shapes)):
                if moves := self._fleet.moves(chunk, kind, self._shapes[i]):
                    self._shapes[i] = moves[0].after
                    placed[i].update(part.key for part in chunk.parts)
                    full[kind] = i
                    break
            else:
                full[kind] = len(self._shapes)
                short = True
        return placed, short

    def _row(
        self, role: RoleDemand, chunks: Sequence[Chunk], before: Sequence[int], placed: Sequence[Counter[str]],
        short: bool,
    ) -> list[str]:  # fmt: skip
        own = [chunk for chunk in chunks if chunk.members(role.key)]
        wanted = sum(chunk.members(role.key) for chunk in own)  # those that stay where they are do not count
        row = [role.key, f"{wanted} × ({role.asks(self._unit)})"]
        if not short:
            return [*row, *(f"{count[role.key]} placed" if count[role.key] else "-" for count in placed), ""]
        cells = {shape: self._cell(role, own, wanted, shape) for shape in set(before)}
        row += [cells[shape] for shape in before]
        needed = -(-wanted // role.per_node) if role.per_node else 1
        return [*row, f"{needed} wanted, {len(before)} there" if needed > len(before) else ""]

    def _cell(self, role: RoleDemand, own: Sequence[Chunk], count: int, number: int) -> str:
        """What one node lacks to hold the role, or its part of it."""
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
            lacks.append(f"MB {members * role.memory_bytes / 2**20:.0f} wanted, {there}")
        if own and (blocked := fleet.blocker(own[0], number)):
            lacks.append(blocked)
        if lacks:
            return "; ".join(lacks)
        fitting = 0
        for chunk in own:
            moves = fleet.moves(chunk, fleet.kind(chunk), number)
            if not moves:
                break
            number, fitting = moves[0].after, fitting + chunk.members(role.key)
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


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
