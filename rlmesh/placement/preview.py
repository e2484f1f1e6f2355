"""Plans a job without starting it, for a described cluster or this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from rlmesh.errors import UsageError
from rlmesh.job.description.config import JobDescription
from rlmesh.job.description.descriptors import BaseWorkloadDesc
from rlmesh.placement.bundles import layout_of
from rlmesh.placement.demand import WHOLE, JobDemand, Pool, RoleDemand, Separation, milli
from rlmesh.placement.machine.cluster_file import nodes_of, read_cluster
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.machine.system import Machine
from rlmesh.placement.node_groups import ipc_notes
from rlmesh.placement.planner import Plan, make_plan

__all__ = ["ClusterLike", "demand_of", "plan_job", "slots_asked", "this_machine"]

ClusterLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Sequence[NodeInfo]
"""A TOML file, its content, or nodes."""


def plan_job(config: JobDescription, cluster: ClusterLike | None = None) -> Plan:
    """The plan of a job on ``cluster``, or on this machine.

    Raises:
        PlacementError: the cluster cannot hold the job.
        UsageError: the description of the cluster has faults.
    """
    demand = demand_of(config)
    if cluster is None:
        nodes: Sequence[NodeInfo] = [this_machine(config, demand)]
    elif isinstance(cluster, str | os.PathLike):
        nodes = read_cluster(Path(cluster))
    elif isinstance(cluster, Mapping):
        nodes = nodes_of(cluster)
    else:
        nodes = cluster
    if not isinstance(nodes, list | tuple) or not all(isinstance(node, NodeInfo) for node in nodes):
        raise UsageError(
            f"a cluster is a TOML file, what it holds as a mapping, or a list of nodes, not {cluster!r:.80}"
        )
    plan = make_plan(demand, nodes)
    return replace(plan, notes=(*plan.notes, *ipc_notes(nodes, plan)))


def this_machine(config: JobDescription, demand: JobDemand, machine: Machine | None = None) -> NodeInfo:
    """This machine as a node. For a job of device type CPU it has ``device_per_node`` virtual slots, by default as
    many as the job asks for."""
    machine = machine or Machine()
    name, notes = os.uname().nodename, tuple[str, ...]()
    if config.device_type == "CPU":
        count = config.device_per_node or slots_asked(demand)
        devices = tuple(Device(i, f"virtual-{i}") for i in range(count))
    else:
        devices, notes = machine.devices(os.environ)
    cpus, memory = machine.cpus(os.environ), machine.memory_bytes(os.environ)
    return NodeInfo(0, name, name, "", 0, cpus, memory, devices, machine.numa(), notes)


def demand_of(config: JobDescription) -> JobDemand:
    """The demand of a job on its nodes."""
    roles = tuple(role for name, workload in config.workloads.items() for role in _role_demands(name, workload))
    order = [role.key for role in roles]
    names = [*order, *config.workloads]
    return JobDemand(
        roles=roles,
        collocations=tuple(tuple(sorted(keys, key=names.index)) for keys in config.collocations),
        fusions=tuple(tuple(sorted(roles, key=names.index)) for roles in config.fusions),
        device_type=config.device_type,
        max_nodes=config.node_number,
        max_devices_per_node=config.device_per_node,
        separations=tuple(Separation(tuple(sorted(s.roles, key=names.index)), s.by) for s in config.separations),
        pools=tuple(Pool(name, tuple(sizes)) for name, sizes in config.pools.items()),
        spare_nodes=config.spare_nodes,
    )


def _role_demands(name: str, workload: BaseWorkloadDesc) -> list[RoleDemand]:
    """The demand of a role, or of each of its groups."""
    role = RoleDemand(
        role=name,
        members=workload.total,
        per_node=workload.per_node,
        elastic=workload.backend == "elastic",
        accelerator_milli=workload.resource.accelerator_milli,
        cpu_milli=milli(workload.resource.cpu),
        memory_bytes=workload.resource.memory_bytes,
        together=workload.together,
        nodes=tuple(workload.nodes),
        devices=tuple(workload.devices),
        pool=workload.pool or "",
    )
    found: list[RoleDemand] = []
    for group_name, group in workload.groups.items():
        resource = group.resource or workload.resource
        found.append(
            RoleDemand(
                role=name,
                members=group.total,
                per_node=group.per_node or role.per_node,
                elastic=role.elastic,
                accelerator_milli=resource.accelerator_milli,
                cpu_milli=milli(resource.cpu),
                memory_bytes=resource.memory_bytes,
                group=group_name,
                first_rank=sum(before.members for before in found),
                together=group.together or workload.together,
                nodes=role.nodes if group.nodes is None else tuple(group.nodes),
                devices=role.devices if group.devices is None else tuple(group.devices),
            )
        )
    return found or [role]


def slots_asked(demand: JobDemand) -> int:
    """Number of devices that are enough for a job: those of each slot that takes more than half of a device, and twice
    the sum of the smaller shares, which is enough in whatever way they are put together."""
    bundles = layout_of(demand).bundles
    whole = sum(s.devices for bundle in bundles for s in bundle.slots if s.share_milli > WHOLE // 2)
    shares = sum(s.devices * s.share_milli for bundle in bundles for s in bundle.slots if s.share_milli <= WHOLE // 2)
    return whole + -(-2 * shares // WHOLE)
