"""Checks between the parts of a job description. No I/O: each returns the faults, one sentence each, beginning with
its key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from rlmesh.job.description.descriptors import BaseWorkloadDesc, ElasticWorkloadDesc
from rlmesh.job.description.placement_rules import SeparationDesc
from rlmesh.job.description.resources import MOST
from rlmesh.job.description.roles import RLRoleType
from rlmesh.job.nearest_name import did_you_mean

__all__ = [
    "call_problems",
    "checks_nodes",
    "collocation_problems",
    "driver_problems",
    "fusion_problems",
    "mask_problems",
    "member_problems",
    "placing_problems",
    "role_name_problems",
    "size_problems",
]

MASKS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")

_ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def role_name_problems(workloads: Mapping[str, BaseWorkloadDesc]) -> list[str]:
    """Check that there are roles, and that their names are distinct in addresses, logs and files."""
    if not workloads:
        return ["workloads: the job has no roles: add one, such as .role('WORKER').run('module.Class')"]
    found: list[str] = []
    seen: dict[str, str] = {}
    for role in workloads:
        if not _ROLE.fullmatch(role):
            found.append(
                f"role {role!r}: a name must be 1 to 64 letters, digits, '_', '.' or '-', and start with a letter"
            )
        other = seen.setdefault(role.lower(), role)
        if other != role:
            found.append(f"role {role}: differs from role {other} only in case")
    return found


def member_problems(workload: BaseWorkloadDesc, node_number: int | None, device_per_node: int | None) -> list[str]:
    """Check that one role alone fits into the nodes and devices that the job declares."""
    found: list[str] = []
    asked = workload.resource.accelerator
    if device_per_node is not None and asked > device_per_node:
        found.append(
            f"resource.accelerator: a member asks for {asked:g} accelerators, and device_per_node is {device_per_node}"
        )
    if node_number is None or workload.per_node is None:
        return found
    nodes = -(-workload.total // workload.per_node)
    if nodes > node_number:
        key = "nnodes" if isinstance(workload, ElasticWorkloadDesc) else "per_node"
        found.append(
            f"{key}: {workload.total} members, {workload.per_node} on a node, need {nodes} nodes, and node_num "
            f"is {node_number}"
        )
    return found


def size_problems(workloads: Mapping[str, BaseWorkloadDesc]) -> list[str]:
    """Check that the size of the whole job can be planned."""
    members = sum(workload.total for workload in workloads.values())
    devices = sum(workload.total * workload.resource.accelerator for workload in workloads.values())
    asked = {"members": members, "accelerators": int(devices)}
    return [
        f"workloads: the job has {number} {what} in all, more than {MOST}: is a number wrong?"
        for what, number in asked.items()
        if number > MOST
    ]


def mask_problems(workloads: Mapping[str, BaseWorkloadDesc], global_env: Mapping[str, str]) -> list[str]:
    """Check that no environment variable overrides the planned devices of a member."""
    hint = "rlmesh sets it for members with accelerators: leave it out, or choose devices with on_devices(...)"
    users = [role for role, workload in workloads.items() if workload.resource.accelerator > 0]
    found = [f"global_env: {name}={global_env[name]}: {hint}" for name in MASKS if users and name in global_env]
    return found + [
        f"role {role}: envs: {name}={workloads[role].envs[name]}: {hint}"
        for role in users
        for name in MASKS
        if name in workloads[role].envs
    ]


def checks_nodes(workloads: Mapping[str, BaseWorkloadDesc]) -> bool:
    """True if nodes are checked before the start: an elastic role wants it (``comm_pre_check``), or there is none.

    All nodes are checked before members are placed, so there is one check for all roles.
    """
    wanted = [workload.comm_pre_check for workload in workloads.values() if isinstance(workload, ElasticWorkloadDesc)]
    return any(wanted) or not wanted


def driver_problems(workloads: Mapping[str, BaseWorkloadDesc]) -> list[str]:
    """Check that there is a ``run()`` at whose return the job ends, as far as the sources show."""
    drivers = {role: workload for role, workload in workloads.items() if workload.is_driver}
    trainer = workloads.get(RLRoleType.TRAINER)
    if not drivers and trainer is not None and trainer.is_driver is None:
        drivers = {RLRoleType.TRAINER.name: trainer}
    if drivers:
        return [
            f"role {role}: entry_point: {workload.entry_point} has no run(), for whose return the job waits"
            for role, workload in drivers.items()
            if workload.resolved.runs is False
        ]
    candidates = [workload for workload in workloads.values() if workload.is_driver is not False]
    if any(workload.resolved.runs is not False for workload in candidates):
        return []
    return [
        "workloads: no role has a run() for whose return the job could wait: give one a run() method, or start a job "
        "that only serves calls by start(), as in 'with job.start() as handle, handle.join() as runtime:' "
        "('async with' on an event loop); it lives until the block is left"
    ]


def call_problems(workloads: Mapping[str, BaseWorkloadDesc]) -> list[str]:
    """Check that declared callees exist."""
    return [
        f"role {role}: calls: the job has no role {callee!r}.{did_you_mean(callee, workloads)}"
        for role, workload in workloads.items()
        for callee in workload.calls
        if callee not in workloads
    ]


def collocation_problems(
    collocations: Sequence[AbstractSet[str]],
    workloads: Mapping[str, BaseWorkloadDesc],
    others: AbstractSet[str] = frozenset(),
) -> list[str]:
    """Check that the sets of roles that share devices name existing roles, once each, whose shares fit.

    ``others`` are roles that exist but have no descriptor because of faults of their own.
    """
    found: list[str] = []
    placed: dict[str, int] = {}
    asked = {role: workload.resource.accelerator_milli for role, workload in workloads.items()}
    for role, workload in workloads.items():
        for name, group in workload.groups.items():
            asked[f"{role}/{name}"] = (group.resource or workload.resource).accelerator_milli
    for number, roles in enumerate(collocations):
        where = f"collocation of {', '.join(sorted(roles)) or 'nothing'}"
        if len(roles) < 2:
            found.append(f"{where}: needs at least two roles")
        for role in sorted(roles):
            if role not in asked and role not in others:
                hint = did_you_mean(role, {*asked, *others})
                found.append(f"{where}: the job has no role {role!r}.{hint}")
            elif role in workloads and workloads[role].groups:
                groups = ", ".join(f"{role}/{group}" for group in workloads[role].groups)
                found.append(f"{where}: role {role} has groups: name one of {groups}")
            elif placed.setdefault(role, number) != number:
                found.append(f"{where}: role {role} is in another collocation already")
        known = [asked[role] for role in roles if role in asked]
        shares = sum(share for share in known if share < 1000)
        if shares > 1000:
            found.append(
                f"{where}: their shares of an accelerator add up to {shares / 1000:g}: they share one, so the "
                "sum must be at most 1"
            )
    return found


def fusion_problems(
    fusions: Sequence[AbstractSet[str]],
    workloads: Mapping[str, BaseWorkloadDesc],
    separations: Sequence[SeparationDesc] = (),
    others: AbstractSet[str] = frozenset(),
) -> list[str]:
    """Check that the sets of roles that share processes can be one process each.

    ``others`` are roles that exist but have no descriptor because of faults of their own.
    """
    found: list[str] = []
    placed: dict[str, int] = {}
    for number, roles in enumerate(fusions):
        where = f"fusion of {', '.join(sorted(roles)) or 'nothing'}"
        if len(roles) < 2:
            found.append(f"{where}: needs at least two roles")
        for role in sorted(roles):
            if role not in workloads and role not in others:
                found.append(f"{where}: the job has no role {role!r}.{did_you_mean(role, {*workloads, *others})}")
            elif placed.setdefault(role, number) != number:
                found.append(f"{where}: role {role} is in another fusion already")
        known = {role: workload for role, workload in workloads.items() if role in roles}
        found += [f"{where}: {problem}" for problem in _one_process_problems(known)]
        found += [
            f"{where}: {' and '.join(both)} are to be kept apart as well: drop one of the two"
            for separation in separations
            if separation.by != "spread" and len(both := sorted(separation.roles & roles)) > 1
        ]
    return found


def _one_process_problems(workloads: Mapping[str, BaseWorkloadDesc]) -> list[str]:
    """Return the faults that keep roles from sharing processes, member by member."""
    found = [
        f"role {role} has groups, and a process is of one place: give the fused roles no groups"
        for role, workload in workloads.items()
        if workload.groups
    ]
    if len({workload.total for workload in workloads.values()}) > 1:
        counts = ", ".join(f"{role} has {workload.total}" for role, workload in workloads.items())
        found.append(f"the roles must have the same number of members: {counts}")
    if len(running := [role for role, workload in workloads.items() if workload.resolved.runs]) > 1:
        found.append(
            f"{' and '.join(running)} both have a run(), and a process has one main thread: leave it to one of them"
        )
    names = dict.fromkeys(name for workload in workloads.values() for name in workload.envs)
    for name in names:
        values = {role: workload.envs[name] for role, workload in workloads.items() if name in workload.envs}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{role} {value!r}" for role, value in values.items())
            found.append(f"envs: {name} cannot have several values in one process: {said}")
    return found


def placing_problems(
    workloads: Mapping[str, BaseWorkloadDesc],
    separations: Sequence[SeparationDesc],
    pools: Mapping[str, Sequence[int]],
    collocations: Sequence[AbstractSet[str]],
) -> list[str]:
    """Check that separations and pools name existing roles, and do not contradict collocations."""
    keys = {f"{role}/{group}" for role, workload in workloads.items() for group in workload.groups}
    found: list[str] = []
    for separation in separations:
        where = f"separation of {', '.join(sorted(separation.roles)) or 'nothing'}"
        if not separation.roles:
            found.append(f"{where}: name at least one role")
        found += [
            f"{where}: the job has no role {role!r}.{did_you_mean(role, {*workloads, *keys})}"
            for role in sorted(separation.roles - set(workloads) - keys)
        ]
        found += [
            f"{where}: {' and '.join(both)} are to share devices as well: drop one of the two"
            for together in collocations
            if separation.by != "spread" and len(both := sorted(separation.roles & together)) > 1
        ]
    found += [
        f"pools.{name}: {list(sizes)} must be numbers of devices above 0, one for each of its nodes"
        for name, sizes in pools.items()
        if not sizes or any(not 1 <= size <= MOST for size in sizes)
    ]
    for role, workload in workloads.items():
        if workload.pool and workload.pool not in pools:
            found.append(f"role {role}: pool: there is no pool {workload.pool!r}.{did_you_mean(workload.pool, pools)}")
        if workload.pool and workload.groups:
            found.append(f"role {role}: pool: a role with groups cannot use a pool: give its groups devices or nodes")
    return found
