"""Placement of members, and the worker specifications of their processes. No I/O."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlmesh.agent.processes.error_file import ERROR_FILE
from rlmesh.agent.protocol import WorkerSpec
from rlmesh.job.context import COLLOCATION_ENV
from rlmesh.job.restarts import RestartEvent
from rlmesh.master.context import MemberId
from rlmesh.master.jobspec import JobSpec
from rlmesh.placement.demand import WHOLE
from rlmesh.placement.machine.environment import device_environment
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.placement.node_groups import ipc_notes
from rlmesh.placement.planner import Placement, Plan, make_plan

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Site:
    """Values of this start of the job that are not in its description: the secret and the master's address."""

    key_hex: str
    master_endpoint: str


class Scheduler:
    """Plans a job and writes the specifications of its workers."""

    def __init__(self, spec: JobSpec, site: Site) -> None:
        self._spec = spec
        self._site = site

    def plan(
        self,
        nodes: Iterable[NodeInfo],
        *,
        pinned: Sequence[Placement] = (),
        excluded_nodes: Collection[int] = (),
        excluded_devices: Collection[str] = (),
        spare_nodes: int | None = None,
    ) -> Plan:
        """Place all members; the ``pinned`` placements stay. See :func:`make_plan`.

        Raises:
            PlacementError: there is not enough room; the message has a table of what is missing.
        """
        nodes = tuple(nodes)
        plan = make_plan(
            self._spec.demand, nodes, pinned=pinned, excluded_nodes=excluded_nodes,
            excluded_devices=excluded_devices, spare_nodes=spare_nodes,
        )  # fmt: skip
        return replace(plan, notes=(*plan.notes, *ipc_notes(nodes, plan)))

    def group_leaders(self, plan: Plan) -> dict[str, int]:
        """Return the node of rank 0 for each elastic role, where the process group's port must be."""
        elastic = [role.name for role in self._spec.roles if role.backend == "elastic"]
        return {role: plan.of(role)[0].node_rank for role in elastic}

    def log_path(self, role: str, rank: int) -> str:
        return f"{self._spec.run_dir}/logs/{role}-{rank}.log"

    def lease_agents(
        self, placement: Placement, plan: Plan, nodes: Mapping[int, NodeInfo]
    ) -> tuple[tuple[int, str], ...]:
        """Return rank and agent address of the nodes on which a member's group leases devices, ordered by rank.

        Empty if the group is on one node, or if no other role can be on its devices.
        """
        role = self._spec.role(placement.role)
        key = f"{role.name}/{placement.group}" if placement.group else role.name
        shared = self._spec.demand.sharing(key) or any(share.milli < WHOLE for share in placement.devices)
        if role.backend != "elastic" or not shared:
            return ()
        own = nodes[placement.node_rank]
        ranks = sorted({other.node_rank for other in plan.of(role.name)})
        at = [(rank, nodes[rank]) for rank in ranks if rank in nodes]
        if len(at) < 2:
            return ()
        return tuple(
            (rank, node.agent_endpoint if node.machine == own.machine else node.agent_public or node.agent_endpoint)
            for rank, node in at
        )

    def process_spec(self, members: Sequence[WorkerSpec]) -> WorkerSpec:
        """Return the specification of one process that hosts all of these members, with the first one's log, name and
        devices.

        Among several elastic roles, the process group of the first one is used.
        """
        first, *others = members
        if not others:
            return first
        env: dict[str, str] = {}
        for member in reversed(members):
            env |= member.env
        roles = dict.fromkeys(name for member in members for name in member.env.get(COLLOCATION_ENV, "").split(","))
        if first.devices:
            roles |= dict.fromkeys(member.role for member in members)
        if together := [name for name in roles if name]:
            env[COLLOCATION_ENV] = ",".join(together)
        return replace(first, env=env, fused=tuple(others))

    def worker_spec(
        self, placement: Placement, node: NodeInfo, incarnation: int, ports: Mapping[str, int],
        restart: RestartEvent | None = None, hosts: Mapping[str, str] | None = None,
        lease_agents: tuple[tuple[int, str], ...] = (),
    ) -> WorkerSpec:  # fmt: skip
        """Return the specification of one member's process.

        Args:
            ports: reserved port of each elastic role.
            restart: why the process replaces another one.
            hosts: address of the node on which the port is reserved, by role, unless it is loopback.
            lease_agents: see ``lease_agents()``.
        """
        spec, role = self._spec, self._spec.role(placement.role)
        devices = tuple(share.device for share in placement.devices)
        env = {**role.env, **device_environment(devices, node.devices, spec.demand.device_type, role.env)}
        key = f"{role.name}/{placement.group}" if placement.group else role.name
        together = spec.demand.sharing(key)
        if together:
            env[COLLOCATION_ENV] = ",".join(together)
        if role.backend == "elastic":
            host = (hosts or {}).get(role.name) or LOOPBACK
            env |= _torchrun_env(spec, placement, role.members, incarnation, host, ports[role.name])
            env[ERROR_FILE] = f"{_socket_dir(node)}/error-{role.name}-{placement.rank}-{incarnation}.json"
            env.setdefault(NCCL_ERRORS, os.environ.get(NCCL_ERRORS, "1"))
        return WorkerSpec(
            job_id=spec.job_id,
            job_name=spec.job_name,
            key_hex=self._site.key_hex,
            role=role.name,
            rank=placement.rank,
            world_size=role.members,
            incarnation=incarnation,
            local_rank=placement.local_rank,
            local_world_size=placement.local_world_size,
            node_rank=placement.node_rank,
            node_name=node.name,
            entry=role.entry,
            master_endpoint=self._site.master_endpoint,
            socket_dir=_socket_dir(node),
            run_dir=spec.run_dir,
            log_path=self.log_path(*(placement.process or (role.name, placement.rank))),
            backend=role.backend,
            user_config=spec.user_config,
            main_path=spec.main_path,
            program=spec.program,
            import_roots=spec.import_roots,
            env=env,
            devices=devices,
            group=placement.group,
            binding=placement.binding,
            grace_s=spec.grace_s,
            call_timeout_s=spec.call_timeout_s,
            restart=restart,
            resume=spec.resume,
            lease_agents=lease_agents,
            # In a job of device type CPU, the memory asked for is no limit: it only balances the nodes.
            memory_limit_bytes=placement.memory_bytes if spec.demand.device_type == "GPU" else 0,
        )


def _socket_dir(node: NodeInfo) -> str:
    """Return the folder of a node's sockets, in which its agent listens; its guardian removes it."""
    return os.path.dirname(node.agent_endpoint.partition("://")[2])


NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""With 1, which torchrun sets too, a failing NCCL operation ends the process instead of blocking it."""


def by_node(plan: Plan) -> dict[int, tuple[MemberId, ...]]:
    """Return the members of each node, in the order of the plan."""
    found: dict[int, list[MemberId]] = {}
    for placement in plan.placements:
        found.setdefault(placement.node_rank, []).append((placement.role, placement.rank))
    return {node_rank: tuple(members) for node_rank, members in found.items()}


def _torchrun_env(
    spec: JobSpec, placement: Placement, world_size: int, incarnation: int, host: str, port: int
) -> dict[str, str]:
    """Return the variables that torchrun sets, so that ``init_process_group()`` works without arguments."""
    rule = spec.role(placement.role).restart
    values: dict[str, object] = {
        "RANK": placement.rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
        "GROUP_RANK": placement.group_rank,
        "GROUP_WORLD_SIZE": placement.group_world_size,
        "NODE_RANK": placement.group_rank,
        "ROLE_NAME": placement.role,
        "ROLE_RANK": placement.rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": incarnation,
        "TORCHELASTIC_MAX_RESTARTS": rule.max_restarts if rule.scope != "never" else 0,
        "TORCHELASTIC_RUN_ID": spec.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in values.items()}
