"""Node groups: several agents on one machine, as when Slurm starts one task per GPU. No I/O.

Their members use Unix sockets and shared memory as on any machine. They may not be able to open each other's
GPU memory, if a mask hides the GPUs of one from the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rlmesh.placement.machine.inventory import GPU, MIG, NodeInfo
from rlmesh.placement.plan import Plan

__all__ = ["hidden_devices", "ipc_notes", "node_groups"]


def node_groups(nodes: Iterable[NodeInfo]) -> list[tuple[int, ...]]:
    """The ranks of each group of more than one node, the leader (the lowest rank of its machine) first."""
    found: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        if node.group:
            found.setdefault((node.group, node.machine), []).append(node.node_rank)
    return [tuple(sorted(ranks)) for ranks in found.values() if len(ranks) > 1]


def hidden_devices(one: NodeInfo, other: NodeInfo) -> bool:
    """True if one of two agents of a machine has a GPU that the other does not see, so that CUDA IPC between their
    members would fail."""
    seen, others = ({d.uuid for d in node.devices if d.kind in (GPU, MIG)} for node in (one, other))
    return seen != others


def ipc_notes(nodes: Iterable[NodeInfo], plan: Plan | None = None) -> tuple[str, ...]:
    """Notes for the plan: agents between which CUDA IPC is refused, the channel used instead, the roles concerned,
    and the options of Slurm that avoid it."""
    by_rank = {node.node_rank: node for node in nodes}
    notes = []
    for ranks in node_groups(by_rank.values()):
        members = [by_rank[rank] for rank in ranks]
        leader = members[0]
        if any(hidden_devices(leader, other) for other in members[1:]):
            total = len({d.uuid for node in members for d in node.devices if d.kind in (GPU, MIG)})
            names = ", ".join(node.name for node in members)
            notes.append(
                f"{leader.group}: its {len(members)} agents ({names}) do not see each other's GPUs, so CUDA IPC "
                f"between them is refused: weights{_between(ranks, plan)} go through shared memory instead (channel "
                "shm), and so do tensors in calls. For CUDA IPC start one task per node: "
                f"sbatch --ntasks-per-node=1 --gpus-per-node={total} (instead of --gpus-per-task), or let the tasks "
                "see all of them: --gpu-bind=none"
            )
    return tuple(notes)


def _between(ranks: Collection[int], plan: Plan | None) -> str:
    """The roles with members on GPUs of several of these agents, for which it matters."""
    placed = [p for p in plan.placements if p.node_rank in ranks and p.devices] if plan is not None else []
    roles = list(dict.fromkeys(placement.role for placement in placed))
    if len({placement.node_rank for placement in placed}) < 2:
        return ""
    return f" between {', '.join(roles[:-1])} and {roles[-1]}" if len(roles) > 1 else f" within {roles[0]}"
