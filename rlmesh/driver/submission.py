"""Conversion of a job description to the specifications for master and agents. Reads only this machine's size."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlmesh.agent.protocol import AgentConfig
from rlmesh.driver.options import Cluster
from rlmesh.errors import JobSpecError
from rlmesh.job.context import Resume
from rlmesh.job.description.config import JobDescription
from rlmesh.job.entry_points.program import this_program
from rlmesh.master.jobspec import JobSpec, RestartRule, RoleSpec, TimeLimits
from rlmesh.placement.demand import JobDemand
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.machine.system import Machine
from rlmesh.placement.preview import demand_of as demand_of
from rlmesh.placement.preview import slots_asked as slots_asked
from rlmesh.run_directory.workspace import Workspace
from rlmesh.wire.main_module import by_value

log = logging.getLogger(__name__)


def cluster_for(config: JobDescription, demand: JobDemand, given: Cluster | None) -> Cluster:
    """Return the nodes that the job starts on: the given ones, else this machine.

    On real machines a job of device type CPU gets ``device_per_node`` virtual slots per node, or an equal part of the
    slots
    that it needs.
    """
    if given is not None and (given.devices_per_node is not None or not given.hosts):
        if config.device_type == "GPU" and given.devices_per_node and not given.nvml and _has_gpus():
            log.warning(
                "the %d devices of each node are virtual, as LocalCluster and --nproc-per-node make them: no member "
                "gets a GPU of its own, and each sees all GPUs of this machine. Submit the job without them to use "
                "the GPUs",
                given.devices_per_node,
            )
        return given
    cluster = given or Cluster((os.uname().nodename,))
    if config.device_type == "GPU":
        return cluster
    slots = config.device_per_node or -(-slots_asked(demand) // len(cluster.names))
    return replace(cluster, devices_per_node=slots)


def _has_gpus(devices: Path = Path("/dev")) -> bool:
    return any(devices.glob("nvidia[0-9]*"))


def expected_nodes(cluster: Cluster) -> tuple[NodeInfo, ...] | None:
    """Return the nodes on this machine as their agents will report them, to try a plan before anything starts."""
    if cluster.hosts:
        return None  # Only the nodes themselves know their devices.
    machine = Machine(nvml=cluster.nvml)
    notes: tuple[str, ...] = ()
    if cluster.devices_per_node is None:
        devices, notes = machine.devices(os.environ)
    else:
        devices = tuple(Device(i, f"virtual-{i}") for i in range(cluster.devices_per_node))
    here, numa = os.uname().nodename, machine.numa()
    cpus, memory = machine.cpus(os.environ), machine.memory_bytes(os.environ)
    return tuple(
        NodeInfo(rank, name, here, "", 0, cpus, memory, devices, numa, notes)
        for rank, name in zip(cluster.node_ranks(), cluster.names, strict=True)
    )


def job_spec(
    config: JobDescription, job_name: str, demand: JobDemand, cluster: Cluster, space: Workspace, *,
    limits: TimeLimits, restart: str | None, submitted_at: float, grace_s: float, resume: Resume | None = None,
    max_restarts: int | None = None, serves: bool = False,
) -> JobSpec:  # fmt: skip
    """Return the job's specification for the master.

    Args:
        restart: scope of restarts from the launch, which wins over the description.
        max_restarts: number of restarts from the launch.
        serves: the caller drives the job.

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
                _restart_rule(config, name, restart, max_restarts),
                tuple(w.calls),
            )
            for name, w in config.workloads.items()
        ),
        demand=demand,
        nnodes=len(cluster.names),
        user_config=_pickled(config.user_config),
        main_path=config.main_path,
        program=this_program(),
        import_roots=config.import_roots(),
        call_timeout_s=config.call_timeout_s,
        grace_s=grace_s,
        limits=limits,
        submitted_at=submitted_at,
        resume=resume,
        serves=serves,
    )


def _restart_rule(config: JobDescription, role: str, scope: str | None, max_restarts: int | None) -> RestartRule:
    rule = RestartRule(**config.restart_of(role, scope).model_dump())
    if max_restarts is None or config.names_a_budget(role):
        return rule
    scope = rule.scope if max_restarts else "never"
    return replace(rule, scope=scope, max_restarts=max_restarts, of_job=max_restarts)


def _pickled(user_config: object) -> bytes:
    try:
        return by_value(user_config)
    except Exception as error:
        raise JobSpecError(
            f"config: the object given to .config(...) ({type(user_config).__name__}) cannot be sent to the "
            f"workers: {type(error).__name__}: {error}. Leave out open files, locks, connections and the like"
        ) from error


def agent_configs(
    spec: JobSpec, cluster: Cluster, space: Workspace, preload: Sequence[str], env: Mapping[str, str]
) -> list[AgentConfig]:
    """Return one configuration per node; the first one's agent starts the master."""
    alone = [""] * len(cluster.names)
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
            nvml=cluster.nvml,
            preload=tuple(preload),
            import_roots=spec.import_roots,
            python_flags=spec.program.flags,
            grace_s=spec.grace_s,
            submitted_at=spec.submitted_at,
            env=dict(env),
            host=host,
            group=group,
            lease_s=spec.limits.lease_s if len(cluster.names) > 1 else 0.0,
        )
        for rank, name, host, group in zip(
            cluster.node_ranks(), cluster.names, cluster.hosts or alone, cluster.groups or alone, strict=True
        )
    ]
