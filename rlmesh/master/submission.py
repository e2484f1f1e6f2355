"""From a ``DLConfig`` to what the master and the agents are told. Pure but for reading this machine's size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import cloudpickle

from rlmesh.agent.protocol import AgentConfig
from rlmesh.errors import JobSpecError
from rlmesh.job.config import DLConfig
from rlmesh.job.context import Resume
from rlmesh.job.descriptors import BaseWorkloadDesc
from rlmesh.master.jobspec import JobSpec, Limits, RestartRule, RoleSpec
from rlmesh.master.options import Cluster
from rlmesh.master.workspace import Workspace
from rlmesh.placement.chunks import layout_of
from rlmesh.placement.demand import WHOLE, JobDemand, RoleDemand, milli
from rlmesh.placement.inventory import Device, NodeInfo


def demand_of(config: DLConfig) -> JobDemand:
    """What the job asks of its nodes."""
    order = list(config.workloads)
    return JobDemand(
        roles=tuple(_role_demand(name, workload) for name, workload in config.workloads.items()),
        collocations=tuple(tuple(sorted(roles, key=order.index)) for roles in config.collocations),
        device_type=config.device_type,
        max_nodes=config.node_number,
        max_devices_per_node=config.device_per_node,
    )


def _role_demand(name: str, workload: BaseWorkloadDesc) -> RoleDemand:
    return RoleDemand(
        role=name,
        members=workload.total,
        per_node=workload.per_node,
        elastic=workload.backend == "elastic",
        accelerator_milli=workload.resource.accelerator_milli,
        cpu_milli=milli(workload.resource.cpu),
        memory_bytes=workload.resource.memory_bytes,
    )


def cluster_for(config: DLConfig, demand: JobDemand, given: Cluster | None) -> Cluster:
    """The nodes that the job starts on: those given, else this machine.

    On real machines a job of device type CPU gets ``device_per_node`` virtual slots each, or its share of what it
    asks for if it does not say.
    """
    if given is not None and (given.devices_per_node is not None or not given.hosts):
        return given
    cluster = given or Cluster((os.uname().nodename,))
    if config.device_type == "GPU":
        return cluster
    slots = config.device_per_node or -(-slots_asked(demand) // len(cluster.names))
    return replace(cluster, devices_per_node=slots)


def slots_asked(demand: JobDemand) -> int:
    """Enough devices for all of a job: whole ones for each slot that takes one, shares rounded up per chunk."""
    chunks = layout_of(demand).chunks
    whole = sum(s.devices for chunk in chunks for s in chunk.slots if s.share_milli > WHOLE // 2)
    shares = sum(s.devices * s.share_milli for chunk in chunks for s in chunk.slots if s.share_milli <= WHOLE // 2)
    return whole + -(-2 * shares // WHOLE)


def expected_nodes(cluster: Cluster) -> tuple[NodeInfo, ...] | None:
    """What the agents of virtual nodes will report, so that a plan can be tried before anything starts."""
    if cluster.devices_per_node is None or cluster.hosts:
        return None  # Only they know what they have.
    slots = tuple(Device(i, f"virtual-{i}") for i in range(cluster.devices_per_node))
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return tuple(
        NodeInfo(rank, name, os.uname().nodename, "", 0, cpus, memory, slots)
        for rank, name in zip(cluster.node_ranks(), cluster.names, strict=True)
    )


def job_spec(
    config: DLConfig, job_name: str, demand: JobDemand, cluster: Cluster, space: Workspace, *,
    limits: Limits, restart: str | None, submitted_at: float, grace_s: float, resume: Resume | None = None,
) -> JobSpec:  # fmt: skip
    """The job as the master needs it.

    Raises:
        JobSpecError: the user's configuration cannot be pickled.
    """
    return JobSpec(
        job_id=space.job_id,
        job_name=job_name,
        run_dir=str(space.run_dir),
        roles=tuple(
            RoleSpec(
                name,
                w.entry,
                w.backend,
                w.total,
                config.envs_of(name),
                w.is_driver,
                dict(w.mesh),
                RestartRule(**config.restart_of(name, restart).model_dump()),
                tuple(w.calls),
            )
            for name, w in config.workloads.items()
        ),
        demand=demand,
        nnodes=len(cluster.names),
        user_config=_pickled(config.user_config),
        main_path=config.main_path,
        import_roots=config.import_roots(),
        call_timeout_s=config.call_timeout_s,
        grace_s=grace_s,
        limits=limits,
        submitted_at=submitted_at,
        resume=resume,
    )


def _pickled(user_config: object) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(user_config)
    except Exception as error:
        raise JobSpecError(
            f"config: the object given to .config(...) ({type(user_config).__name__}) cannot be sent to the "
            f"workers: {type(error).__name__}: {error}. Leave out open files, locks, connections and the like"
        ) from error
    return data


def agent_configs(
    spec: JobSpec, cluster: Cluster, space: Workspace, preload: Sequence[str], env: Mapping[str, str]
) -> list[AgentConfig]:
    """One configuration per node; the first one's agent starts the master."""
    return [
        AgentConfig(
            job_id=spec.job_id,
            job_name=spec.job_name,
            key_hex=space.key.hex(),
            node_rank=rank,
            node_name=name,
            nnodes=len(cluster.names),
            socket_dir=str(space.node_dir(rank)),
            run_dir=spec.run_dir,
            master_endpoint=space.master_endpoint,
            start_master=rank == 0,
            job_path=str(space.job_path),
            virtual_devices=cluster.devices_per_node,
            preload=tuple(preload),
            import_roots=spec.import_roots,
            grace_s=spec.grace_s,
            submitted_at=spec.submitted_at,
            env=dict(env),
            host=host,
        )
        for rank, name, host in zip(
            cluster.node_ranks(), cluster.names, cluster.hosts or [""] * len(cluster.names), strict=True
        )
    ]
