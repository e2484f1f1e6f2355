"""Places the members of a job on nodes and devices. Pure: the same job and nodes give the same plan.

Rules:

* A member of a simple role goes to any node, at most ``per_node`` of its role to one. An elastic role takes
  exactly ``nproc_per_node`` members on each of ``nnodes`` nodes.
* A device is shared in thousandths and never beyond 1000. Roles of a collocation share devices: member i of
  each is on the same device. Those with a share of their own keep it, the others divide the rest exactly.
* ``cpu`` and ``memory`` are limits where the job asks for real accelerators. Where the device type is CPU,
  or all devices are virtual, they are soft: they balance the nodes and are noted when exceeded, but never
  refuse a job, since such a job runs on a laptop what a cluster runs in earnest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlmesh.errors import PlacementError
from rlmesh.placement.demand import WHOLE, Chunk, JobDemand, chunks_of
from rlmesh.placement.inventory import VIRTUAL, Device, NodeInfo
from rlmesh.placement.shortage import shortage_table
from rlmesh.placement.state import NodeState, Taken, place_chunk

SEARCH_STEPS = 20_000
"""Bound on the search that follows when placing one role after the other got stuck."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    device: Device
    milli: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one member runs. ``group_rank`` numbers the nodes of its role, as torchrun's GROUP_RANK."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """All members of a job by role and rank; ``notes`` says what was asked beyond what is there."""

    placements: tuple[Placement, ...]
    nodes: tuple[NodeInfo, ...]
    notes: tuple[str, ...] = ()

    def of(self, role: str) -> tuple[Placement, ...]:
        """The members of a role by rank."""
        return tuple(placement for placement in self.placements if placement.role == role)

    def on(self, node_rank: int) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if placement.node_rank == node_rank)

    def table(self) -> str:
        """One line per member, for people."""
        names = {node.node_rank: node.name for node in self.nodes}
        lines = []
        for p in self.placements:
            shares = ", ".join(f"{s.device.kind} {s.device.index}: {s.milli / WHOLE:g}" for s in p.devices)
            cores = f"cpu {p.cpu_milli / WHOLE:g}"
            lines.append(f"{p.role}:{p.rank}  {names[p.node_rank]}  {shares or '-'}  {cores}")
        return "\n".join(lines)


def make_plan(demand: JobDemand, nodes: Sequence[NodeInfo]) -> Plan:
    """Place every member of ``demand`` on ``nodes``.

    Raises:
        PlacementError: the nodes cannot hold the job; the message has a table of role × node and what is
            short (wanted, there).
    """
    usable = tuple(sorted(nodes, key=lambda node: node.node_rank))[: demand.max_nodes]
    if not usable:
        raise PlacementError("there is no node to place the job on")
    soft = demand.device_type == "CPU" or all(d.kind == VIRTUAL for node in usable for d in node.devices)
    if demand.device_type == "GPU" and not any(node.devices for node in usable):
        soft = False
    limit = demand.max_devices_per_node
    states = tuple(NodeState.fresh(node, soft=soft, max_devices=limit) for node in usable)
    chunks = chunks_of(demand)
    if not chunks:
        return Plan((), usable)
    order = sorted(range(len(chunks)), key=lambda i: _urgency(chunks[i], i))
    taken = _one_after_the_other(chunks, order, states) or _search(chunks, order, states)
    if taken is None:
        raise PlacementError(shortage_table(demand, chunks, states))
    taken = _in_node_order(chunks, taken)
    return Plan(_placements(demand, chunks, taken), usable, _notes(states, chunks, taken))


def _urgency(chunk: Chunk, index: int) -> tuple[int, int, int, int]:
    """Big and bound chunks first; without devices last, in the order of declaration."""
    biggest = max(slot.devices * slot.share_milli for slot in chunk.slots)
    return (-biggest, -len(chunk.slots), 0 if chunk.limits else 1, index)


def _candidates(chunk: Chunk, states: Sequence[NodeState]) -> Iterable[int]:
    """Nodes to try, best first; of nodes that are alike only the first."""
    packed = chunk.device_milli > 0 and not chunk.limits

    def preference(i: int) -> tuple[float, int]:
        state = states[i]
        if packed:
            return (state.free_milli, i)
        return ((-state.free_milli if chunk.device_milli else state.crowd), i)

    seen = set()
    for i in sorted(range(len(states)), key=preference):
        if (likeness := states[i].likeness()) not in seen:
            seen.add(likeness)
            yield i


def _one_after_the_other(
    chunks: Sequence[Chunk], order: Sequence[int], states: tuple[NodeState, ...]
) -> dict[int, Taken] | None:
    current = list(states)
    taken: dict[int, Taken] = {}
    for index in order:
        for i in _candidates(chunks[index], current):
            if (placed := place_chunk(chunks[index], current[i])) is not None:
                current[i], taken[index] = placed
                break
        else:
            return None
    return taken


def _search(chunks: Sequence[Chunk], order: Sequence[int], states: tuple[NodeState, ...]) -> dict[int, Taken] | None:
    """Depth first with a memory of dead ends, for jobs that fit only in an uneven way."""
    dead: set[tuple[int, tuple[object, ...]]] = set()
    path: list[tuple[tuple[NodeState, ...], list[int], Taken | None]] = [
        (states, list(_candidates(chunks[order[0]], states)), None)
    ]
    for _ in range(SEARCH_STEPS):
        current, untried, _taken = path[-1]
        depth = len(path) - 1
        if not untried:
            dead.add((depth, _shape(current)))
            path.pop()
            if not path:
                return None
            continue
        i = untried.pop(0)
        if (placed := place_chunk(chunks[order[depth]], current[i])) is None:
            continue
        after = (*current[:i], placed[0], *current[i + 1 :])
        if depth + 1 == len(order):
            found = [entry[2] for entry in path[1:]] + [placed[1]]
            return {order[k]: taken for k, taken in enumerate(found) if taken is not None}
        if (depth + 1, _shape(after)) not in dead:
            path.append((after, list(_candidates(chunks[order[depth + 1]], after)), placed[1]))
    return None


def _shape(states: Sequence[NodeState]) -> tuple[object, ...]:
    return tuple(sorted(state.likeness() for state in states))


def _in_node_order(chunks: Sequence[Chunk], taken: dict[int, Taken]) -> dict[int, Taken]:
    """Give lower ranks to lower nodes and devices, where chunks of a group ask the same."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, chunk in enumerate(chunks):
        shape = (chunk.group, *((slot.devices, tuple(p.role for p in slot.parts)) for slot in chunk.slots))
        alike.setdefault(shape, []).append(index)
    result: dict[int, Taken] = {}
    for indexes in alike.values():
        places = sorted((taken[i] for i in indexes), key=lambda t: (t.node.node_rank, t.first_device))
        result.update(zip(indexes, places, strict=True))
    return result


def _placements(demand: JobDemand, chunks: Sequence[Chunk], taken: dict[int, Taken]) -> tuple[Placement, ...]:
    where: dict[tuple[str, int], tuple[NodeInfo, tuple[DeviceShare, ...], int, int]] = {}
    for index, chunk in enumerate(chunks):
        for slot, devices in zip(chunk.slots, taken[index].devices, strict=True):
            for part in slot.parts:
                shares = tuple(DeviceShare(device, part.share_milli) for device in devices)
                where[part.role, part.rank] = (taken[index].node, shares, part.cpu_milli, part.memory_bytes)
    result = []
    for role in demand.roles:
        nodes = [where[role.role, rank][0].node_rank for rank in range(role.members)]
        distinct = sorted(set(nodes))
        for rank, node_rank in enumerate(nodes):
            _, shares, cpu, memory = where[role.role, rank]
            result.append(
                Placement(
                    role=role.role,
                    rank=rank,
                    node_rank=node_rank,
                    local_rank=nodes[:rank].count(node_rank),
                    local_world_size=nodes.count(node_rank),
                    group_rank=distinct.index(node_rank),
                    group_world_size=len(distinct),
                    devices=shares,
                    cpu_milli=cpu,
                    memory_bytes=memory,
                )
            )
    return tuple(result)


def _notes(states: Sequence[NodeState], chunks: Sequence[Chunk], taken: dict[int, Taken]) -> tuple[str, ...]:
    notes = []
    for state in states:
        here = [chunks[i] for i, t in taken.items() if t.node.node_rank == state.node.node_rank]
        cpu = sum(chunk.cpu_milli for chunk in here)
        if cpu > state.node.cpus * WHOLE:
            asked = f"{cpu / WHOLE:g} cores asked, {state.node.cpus} there"
            notes.append(f"node {state.node.name}: {asked}; its members share them")
    return tuple(notes)
