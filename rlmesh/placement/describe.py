"""A plan as text for people, and as plain values for programs. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlmesh.placement.binding import ranges
from rlmesh.placement.demand import WHOLE
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.plan import Placement, Plan

DETAILED_NODES = 8
"""Up to this many nodes, each device has a line; beyond, nodes with the same content share one line."""


def describe_plan(plan: Plan) -> str:
    """The plan as text: which members are where, on which devices, with which share."""
    used = {placement.node_rank for placement in plan.placements}
    head = f"{len(plan.placements)} members on {len(used)} of {len(plan.nodes)} nodes"
    if plan.spares:
        head += f", {len(plan.spares)} more held back: {fold_names([node.name for node in plan.spares])}"
    body = _devices(plan) if len(plan.nodes) <= DETAILED_NODES else _folded(plan)
    return "\n".join([head, *body, *(f"note: {note}" for note in plan.notes)])


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as values for JSON. Shares are in thousandths of a device, CPUs in thousandths of a core."""
    names = {node.node_rank: node.name for node in plan.nodes}
    return {
        "members": [
            {
                "role": p.role,
                "rank": p.rank,
                "group": p.group,
                "process": _host(p),
                "node": names[p.node_rank],
                "node_rank": p.node_rank,
                "local_rank": p.local_rank,
                "devices": [{"uuid": s.device.uuid, "index": s.device.index, "milli": s.milli} for s in p.devices],
                "cpu_milli": p.cpu_milli,
                "memory_bytes": p.memory_bytes,
                "cpus": ranges(p.binding.cpus) if p.binding else "",
                "numa": list(p.binding.numa) if p.binding else [],
            }
            for p in plan.placements
        ],
        "nodes": [
            {"node_rank": node.node_rank, "name": node.name, "cpus": node.cpus, "devices": len(node.devices)}
            for node in plan.nodes
        ],
        "spares": [node.name for node in plan.spares],
        "notes": list(plan.notes),
    }


def _devices(plan: Plan) -> list[str]:
    lines = []
    for node in plan.nodes:
        here = plan.on(node.node_rank)
        lines.append(f"{node.name}: {_room(node)}, {len(here)} members")
        for device in node.devices:
            tenants = [
                f"{_name(p)} {_share(p, share.milli)}" for p in here for share in p.devices if share.device == device
            ]
            lines.append(f"  {_device(device)}  {', '.join(tenants) or '-'}")
        others = [f"{_name(p)}{_cores(p)}" for p in here if not p.devices]
        if others:
            lines.append(f"  without device  {', '.join(others)}")
    return lines


def _folded(plan: Plan) -> list[str]:
    of_node: dict[int, Counter[str]] = {node.node_rank: Counter() for node in plan.nodes}
    for placement in plan.placements:
        share = f" ({placement.devices[0].milli / WHOLE:g})" if placement.devices else ""
        if host := _host(placement):
            share = f" (in {host.rpartition(':')[0]})"
        many = f" on {len(placement.devices)}" if len(placement.devices) > 1 else ""
        key = f"{placement.role}/{placement.group}" if placement.group else placement.role
        of_node[placement.node_rank][f"{key}{share}{many}"] += 1
    same: dict[tuple[str, str], list[str]] = {}
    for node in plan.nodes:
        held = ", ".join(f"{count} × {what}" for what, count in sorted(of_node[node.node_rank].items()))
        same.setdefault((_room(node), held or "nothing"), []).append(node.name)
    return [f"{fold_names(names)}: {room}: {held}" for (room, held), names in same.items()]


def fold_names(names: Sequence[str]) -> str:
    """The first and the last of several names, and their number."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def _room(node: NodeInfo) -> str:
    kinds = Counter(device.kind for device in node.devices)
    return ", ".join([*(f"{count} {kind}" for kind, count in kinds.items()), f"{node.cpus} CPUs"])


def _device(device: Device) -> str:
    fault = f" ({device.fault})" if device.fault else ""
    return f"{device.index} {device.uuid}{fault}"


def _name(placement: Placement) -> str:
    return f"{placement.role}:{placement.rank}"


def _share(placement: Placement, milli: int) -> str:
    host = _host(placement)
    return f"in {host}" if host else f"{milli / WHOLE:g}"


def _host(placement: Placement) -> str:
    """The member of another role in whose process a fused member runs; empty if it has its own."""
    if placement.process in (None, (placement.role, placement.rank)):
        return ""
    assert placement.process is not None
    return "{}:{}".format(*placement.process)


def _cores(placement: Placement) -> str:
    if host := _host(placement):
        return f" in {host}"
    return f" {placement.cpu_milli / WHOLE:g} CPUs" if placement.cpu_milli else ""
