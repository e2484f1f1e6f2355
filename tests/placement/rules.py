"""The rules of placement said a second time, as plainly as possible, and all placements of a small job tried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from rlmesh.placement.demand import JobDemand, RoleDemand
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.placement.planner import Plan

Member = tuple[str, int]
Spot = tuple[int, tuple[int, ...]]
"""Node and indexes of devices."""


def members(job: JobDemand) -> list[tuple[RoleDemand, Member]]:
    return [(r, (r.role, r.first_rank + i)) for r in job.roles for i in range(r.members)]


def shares(job: JobDemand) -> dict[str, int]:
    """What a member of each role takes of each of its devices."""
    found = {r.key: min(r.accelerator_milli, 1000) for r in job.roles}
    for names in job.collocations:
        together = [r for r in job.roles if r.key in names]
        fixed = sum(r.accelerator_milli for r in together if 0 < r.accelerator_milli < 1000)
        others = [r for r in together if not 0 < r.accelerator_milli < 1000]
        for i, r in enumerate(others):
            found[r.key] = (1000 - fixed) // len(others) + (i < (1000 - fixed) % len(others))
    return found


def devices_of(job: JobDemand, role: RoleDemand) -> int:
    whole = max(1, role.accelerator_milli // 1000)
    return whole if role.accelerator_milli or any(role.key in names for names in job.collocations) else 0


def broken(job: JobDemand, nodes: Sequence[NodeInfo], at: Mapping[Member, Spot]) -> str:
    """The first rule that an assignment breaks; empty if it keeps them all."""
    share = shares(job)
    by_rank = {n.node_rank: n for n in nodes}
    used: Counter[tuple[int, int]] = Counter()
    cpu: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    on_device: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for role, member in members(job):
        node, devices = at[member]
        if len(set(devices)) != devices_of(job, role):
            return f"{member} has {devices}"
        if role.nodes and by_rank[node].name not in role.nodes:
            return f"{member} is on a node that is not its own"
        cpu[node] += role.cpu_milli
        memory[node] += role.memory_bytes
        counts[role.key, node] += 1
        for d in devices:
            used[node, d] += share[role.key]
            on_device.setdefault((node, d), []).append((role.key, member[1]))
    if any(total > 1000 for total in used.values()):
        return "a device is overdrawn"
    if job.device_type == "GPU":
        for n in nodes:
            if cpu[n.node_rank] > n.cpus * 1000 or memory[n.node_rank] > n.memory_bytes:
                return f"{n.name} is overdrawn"
    for role in job.roles:
        for n in nodes:
            count = counts[role.key, n.node_rank]
            if role.per_node is not None and (count > role.per_node or (role.elastic and count % role.per_node)):
                return f"{count} of {role.key} on {n.name}"
        size = role.per_node if role.elastic and role.per_node else role.together
        for i in range(0, role.members, size):
            if len({at[role.role, role.first_rank + j][0] for j in range(i, min(i + size, role.members))}) > 1:
                return f"{role.key} is torn apart"
    return _collocations(job, at) or _separations(job, counts, on_device)


def _collocations(job: JobDemand, at: Mapping[Member, Spot]) -> str:
    for names in job.collocations:
        roles = [r for r in job.roles if r.key in names]
        for i in range(max(r.members for r in roles)):
            spots = {at[r.role, r.first_rank + i] for r in roles if i < r.members}
            if len({(node, frozenset(devices)) for node, devices in spots}) > 1:
                return f"{names} of rank {i} do not share"
    return ""


def _separations(
    job: JobDemand, counts: Mapping[tuple[str, int], int], on_device: Mapping[tuple[int, int], list[tuple[str, int]]]
) -> str:
    for s in job.separations:
        for node in {node for _, node in counts}:
            here = [(key, counts.get((key, node), 0)) for key in s.keys if counts.get((key, node), 0)]
            if s.by == "node" and (len(here) > 1 or (len(s.keys) == 1 and here and here[0][1] > 1)):
                return f"{s} on node {node}"
        for where, tenants in on_device.items():
            own = [tenant for tenant in tenants if tenant[0] in s.keys]
            kinds = {key for key, _ in own}
            if s.by == "device" and (len(kinds) > 1 or (len(s.keys) == 1 and len(own) > 1)):
                return f"{s} on device {where}"
    return ""


def assignments(job: JobDemand, nodes: Sequence[NodeInfo]) -> Iterator[dict[Member, Spot]]:
    """Every way to put every member somewhere, right or wrong."""
    who = members(job)
    options = []
    for role, _ in who:
        spots: list[Spot] = []
        for n in nodes:
            indexes = [d.index for d in n.devices]
            spots += [(n.node_rank, chosen) for chosen in combinations(indexes, devices_of(job, role))]
        options.append(spots)
    for spots_of in product(*options):
        yield {member: spot for (_, member), spot in zip(who, spots_of, strict=True)}


def spots(plan: Plan) -> dict[Member, Spot]:
    return {(p.role, p.rank): (p.node_rank, tuple(share.device.index for share in p.devices)) for p in plan.placements}


def possible(job: JobDemand, nodes: Sequence[NodeInfo]) -> bool:
    """Whether any assignment keeps the rules."""
    return any(not broken(job, nodes, at) for at in assignments(job, nodes))
