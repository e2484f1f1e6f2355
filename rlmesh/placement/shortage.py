"""The message for a job that its nodes cannot hold: a table of role × node and what is short."""

from __future__ import annotations

from collections.abc import Sequence

from rlmesh.placement.demand import WHOLE, Chunk, JobDemand, RoleDemand
from rlmesh.placement.inventory import VIRTUAL
from rlmesh.placement.state import NodeState, place_chunk


def shortage_table(demand: JobDemand, chunks: Sequence[Chunk], states: Sequence[NodeState]) -> str:
    """Explain why the job doesn't fit. Roles are placed in the order of declaration, as far as they go."""
    unit = "GPU" if demand.device_type == "GPU" else "slot"
    current = list(states)
    header = ["role", "wants", *(f"{s.node.name}" for s in states), "nodes"]
    rows = [header, ["(there)", "", *(_room(s, unit) for s in states), str(len(states))]]
    groups = sorted({chunk.group for chunk in chunks})
    for group in groups:
        of_group = [chunk for chunk in chunks if chunk.group == group]
        before = list(current)
        unplaced = 0
        for chunk in of_group:
            for i, state in enumerate(current):
                if (placed := place_chunk(chunk, state)) is not None:
                    current[i] = placed[0]
                    break
            else:
                unplaced += 1
        names = {part.role for chunk in of_group for slot in chunk.slots for part in slot.parts}
        roles = [role for role in demand.roles if role.role in names]
        rows += [_row(role, of_group, before, current, unit, short=unplaced > 0) for role in roles]
    return "\n".join(["the cluster cannot hold the job:", *_align(rows), *_advice(demand, states)])


def _row(
    role: RoleDemand,
    chunks: Sequence[Chunk],
    before: Sequence[NodeState],
    after: Sequence[NodeState],
    unit: str,
    *,
    short: bool,
) -> list[str]:
    wants = [f"{role.accelerator_milli / WHOLE:g} {unit}"] if role.accelerator_milli else []
    wants += [f"{role.cpu_milli / WHOLE:g} CPU"] if role.cpu_milli else []
    wants += [f"{role.memory_bytes / 2**20:.0f} MB"] if role.memory_bytes else []
    row = [role.role, f"{role.members} × ({', '.join(wants) or 'nothing'})"]
    if not short:
        placed = [new.count(role.role) - old.count(role.role) for old, new in zip(before, after, strict=True)]
        return [*row, *(f"{count} placed" if count else "-" for count in placed), ""]
    row += [_cell(role, chunks, state, unit) for state in before]
    needed = -(-role.members // role.per_node) if role.per_node else 1
    return [*row, f"{needed} wanted, {len(before)} there" if needed > len(before) else ""]


def _cell(role: RoleDemand, chunks: Sequence[Chunk], state: NodeState, unit: str) -> str:
    """What one node lacks to hold the role, or its part of it."""
    members = min(role.members, role.per_node or role.members)
    lacks = []
    wanted = members * role.accelerator_milli
    if wanted > state.free_milli:
        lacks.append(f"{unit} {wanted / WHOLE:g} wanted, {state.free_milli / WHOLE:g} there")
    if not state.soft and members * role.cpu_milli > state.cpu_milli:
        cores = f"{members * role.cpu_milli / WHOLE:g} wanted, {state.cpu_milli / WHOLE:g} there"
        lacks.append(f"CPU {cores}")
    if not state.soft and members * role.memory_bytes > state.memory_bytes:
        there = f"{state.memory_bytes / 2**20:.0f} there"
        lacks.append(f"MB {members * role.memory_bytes / 2**20:.0f} wanted, {there}")
    if lacks:
        return "; ".join(lacks)
    fitting, current = 0, state
    for chunk in chunks:
        if (placed := place_chunk(chunk, current)) is None:
            break
        current, fitting = placed[0], fitting + chunk.members(role.role)
    return f"room for {fitting} of {role.members}"


def _room(state: NodeState, unit: str) -> str:
    free = f"{len(state.devices)} {unit}"
    return f"{free}, {state.node.cpus} CPU{' (soft)' if state.soft else ''}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _advice(demand: JobDemand, states: Sequence[NodeState]) -> list[str]:
    asks = any(role.accelerator_milli for role in demand.roles) or bool(demand.collocations)
    real = [d for state in states for d in state.devices if d.kind != VIRTUAL]
    if demand.device_type == "GPU" and asks and not real:
        if any(state.devices for state in states):
            return ["the devices of this cluster are virtual slots: declare more of them, or ask for less"]
        return [
            "no node has a GPU. To run this job without one, build it with device_type('CPU'): "
            "accelerators are then virtual slots, device_per_node of them on each node"
        ]
    return ["ask for less, or give the job more nodes or devices"]
