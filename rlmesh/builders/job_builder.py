"""Builders: a chain of calls that describes a job.

::

    job = (
        DLJobBuilder()
        .role("WORKER").run(Worker).total(4)
        .role("TRAINER").run(Trainer)
        .build()
    )
    job.submit("hello")

Faults are reported by ``build()``, all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlmesh.builders.config import DLJob
from rlmesh.builders.role_builder import (
    CustomRoleBuilder,
    ElasticRoleBuilder,
    RoleBuilder,
    SimpleRoleBuilder,
    UnknownMethod,
    joined,
)
from rlmesh.errors import JobSpecError, UsageError
from rlmesh.job.description.checks import collocation_problems, fusion_problems, placing_problems
from rlmesh.job.description.descriptors import AnyWorkloadDesc, ElasticWorkloadDesc, ResourceDesc
from rlmesh.job.description.placement_rules import (
    Apart,
    ResourcePoolManager,
    SeparationDesc,
    pools_of,
)
from rlmesh.job.description.roles import role_name
from rlmesh.job.description.spec import SpecError
from rlmesh.job.entry_points.entry import EntryLike
from rlmesh.job.entry_points.torchrun_command import parse_torchrun
from rlmesh.job.restarts import Scope

__all__ = ["ELASTIC_ROLE", "DLJobBuilder"]

RoleT = TypeVar("RoleT", bound="RoleBuilder[DLJobBuilder]")

ELASTIC_ROLE = "ELASTIC"
"""Name of the role that ``train`` makes when no role was named."""


class DLJobBuilder:
    """Describes a job of any roles: job-level settings, then ``role(name)`` with ``run`` or ``train``."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._global_env: Any = {}
        self._roles: list[RoleBuilder[DLJobBuilder]] = []
        self._role: str | None = None
        self._together: list[tuple[str, ...]] = []
        self._fused: list[tuple[str, ...]] = []
        self._all_but: tuple[str, ...] | None = None
        self._apart: list[tuple[tuple[str, ...], Apart]] = []
        self._pool_of: dict[str, str] = {}
        self._node_check = True
        self._problems: list[str] = []

    if not TYPE_CHECKING:  # hidden, so that type checkers know which methods there are

        def __getattr__(self, name: str) -> Any:
            raise UnknownMethod.of(self, name)

    def node_num(self, num: int = 1) -> Self:
        """Set the maximum number of nodes; by default all nodes of the cluster."""
        self._fields["node_number"] = num
        return self

    def device_per_node(self, num: int = 8) -> Self:
        """Set the maximum number of accelerators per node; by default all accelerators of a node."""
        self._fields["device_per_node"] = num
        return self

    def device_type(self, device_type: str = "GPU") -> Self:
        """Set the device type: ``GPU`` (the default), or ``CPU``: accelerators are then virtual slots that only
        limit placement."""
        self._fields["device_type"] = device_type
        return self

    def dl_type(self, dl_type: str = "SFT") -> Self:
        """Set a label: PRE, SFT, RL or MULTIMODAL."""
        self._fields["dl_type"] = dl_type
        return self

    def config(self, config: Any = None) -> Self:
        """Set the user's configuration, which roles read from ``current_worker().job_info.user_config``.

        Any object that can be pickled: a dict, a Namespace, a dataclass, a pydantic model, an OmegaConf.
        """
        self._fields["user_config"] = config
        return self

    def global_env(self, env: Mapping[str, str] | None = None) -> Self:
        """Set environment variables of all roles; a role's own ``env`` wins. Several calls add up."""
        self._global_env = joined(self._global_env, env)
        return self

    def skip_node_check(self) -> Self:
        """Start elastic roles without the check of their nodes' communication (``comm_pre_check``)."""
        self._node_check = False
        return self

    def role(self, role: str | Enum) -> Self:
        """Name the role that the next ``run``, ``train`` or ``custom`` defines."""
        self._report_unused_role()
        self._role = role_name(role)
        return self

    def run(
        self, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> SimpleRoleBuilder[DLJobBuilder]:
        """Define the role as independent members that run ``entrypoint``."""
        return self._add(SimpleRoleBuilder(self, self._take_role("run"), entrypoint, class_name))

    def train(
        self, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> ElasticRoleBuilder[DLJobBuilder]:
        """Define the role as one SPMD group whose members find torch.distributed's variables.

        Without a preceding ``role`` it is called ELASTIC.
        """
        return self._add(ElasticRoleBuilder(self, self._take_role("train"), entrypoint, class_name))

    def custom(
        self, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> CustomRoleBuilder[DLJobBuilder]:
        """Define the role by module and class name."""
        return self._add(CustomRoleBuilder(self, self._take_role("custom"), entrypoint, class_name))

    def workload(
        self, role: str | Enum, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> SimpleRoleBuilder[DLJobBuilder]:
        """Define a role as ``role(role).run(entrypoint)`` does."""
        return self.role(role).run(entrypoint, class_name)

    def by_run_cmd(self, cmd: str) -> Self:
        """Describe the job of a torchrun command, such as ``torchrun --nproc_per_node=2 train.py --lr 1``.

        The script becomes an elastic role (ELASTIC, unless ``role`` named another) with one accelerator per
        process. Options about rendezvous, addresses and logs are ignored, because rlmesh handles these itself. The
        options ``--network-check``, ``--node-check`` and ``--precheck`` of ``dlrover-run`` decide about the check of
        the nodes, which `skip_node_check` turns off.
        """
        try:
            command = parse_torchrun(cmd)
        except ValueError as error:
            self._problems.append(f"by_run_cmd: {error}")
            return self
        procs = command.nproc_per_node or self._fields.get("device_per_node")
        if procs is None:
            self._problems.append(
                "by_run_cmd: --nproc_per_node leaves the number to the machine: give a number, or "
                "device_per_node(n) before by_run_cmd"
            )
        if command.node_check is not None:
            self._node_check = command.node_check
        self.node_num(command.nnodes)
        self._fields.setdefault("device_per_node", procs)
        role = self.train(command.entry).nnodes(command.nnodes).nproc_per_node(procs or 1)
        # As with torchrun: no restarts unless asked for, and then also after an exception.
        role.max_restarts(command.max_restarts).restart(on_error=True)
        return self

    def with_restart(self, scope: Scope | None = None, **settings: Any) -> Self:
        """Set the restart policy of roles that have no ``restart(…)`` of their own.

        By default the member alone is restarted, or, of an elastic role, all members with a new rendezvous; at
        most three times within ten minutes.

        Args:
            scope: what is restarted: ``member`` (of elastic roles the group), ``role``, ``job``, or ``never``:
                then the job fails.
            settings: ``max_restarts``, ``window_s``, ``delay_s``, ``max_delay_s``, ``on_error`` of `RestartPolicy`.
        """
        given = {"scope": scope, **settings} if scope is not None else settings
        self._fields["restart"] = {**self._fields.get("restart", {}), **given}
        return self

    def limits(self, **seconds: float) -> Self:
        """Set time limits of the job's phases: ``setup_s``, ``teardown_s``, ``hang_s``, … of `TimeLimits`."""
        self._fields["limits"] = {**self._fields.get("limits", {}), **seconds}
        return self

    def with_collocation(self, *roles: str | Enum) -> Self:
        """Let the members of these roles share accelerators: rank i of each is on the same one.

        Each role belongs to at most one such set. A role with a share of its own (``accelerator=0.4``) keeps
        it; roles that ask for a whole accelerator divide the rest evenly. CPU and memory are not shared.
        """
        self._together.append(tuple(map(role_name, roles)))
        return self

    def with_collocation_all(self, *exclude_roles: str | Enum) -> Self:
        """Collocate all roles that use accelerators, except ``exclude_roles``."""
        self._all_but = tuple(map(role_name, exclude_roles))
        return self

    def with_fusion(self, *roles: str | Enum) -> Self:
        """Let the members of these roles share processes: rank i of each is in the same one.

        ::

            .with_fusion("ACTOR", "ROLLOUT", "REFERENCE")

        Each role keeps its class, its name in calls and its own object; ``current_worker().fused("ROLLOUT")`` is the
        object of another one. Their ``def`` methods run on the one main thread, one after the other. The process has
        the devices and cores of the role that asks for most, and the memory of all; it has the log of the role that was
        declared first, with the output of all. If the process dies, all of its roles are restarted together, by the
        strictest
        of their policies.
        """
        self._fused.append(tuple(map(role_name, roles)))
        return self

    def with_separation(self, *roles: str | Enum, by: Apart = "device") -> Self:
        """Keep roles apart; groups of a role are named ``"ROLLOUT/prefill"``.

        Args:
            roles: a single role is kept apart from itself: its members from each other.
            by: ``device``: they share no device; ``node``: no node has members of two of them; ``spread``: the
                members of each are divided among as many nodes as the cluster allows.
        """
        self._apart.append((tuple(map(role_name, roles)), by))
        return self

    def with_pools(
        self, spec: ResourcePoolManager | Mapping[str, Sequence[int]], mapping: Mapping[Any, str] | None = None
    ) -> Self:
        """Divide the devices into pools; the roles of a pool share its devices, rank by rank.

        A role without a number of members has a member on every device of its pool.

        Args:
            spec: pool → devices on each of its nodes, such as ``{"global_pool": [8, 8]}``; or a manager, which has
                the mapping as well.
            mapping: role → pool.
        """
        try:
            self._fields["pools"], self._pool_of = pools_of(spec, mapping)
        except UsageError as error:
            self._problems.append(f"with_pools: {error}")
        return self

    def spare_nodes(self, num: int = 1) -> Self:
        """Set the number of nodes that stay empty, to replace a node that is lost or has a bad device."""
        self._fields["spare_nodes"] = num
        return self

    def relaunch(self, command: str) -> Self:
        """Run ``command`` on the first node when a node is lost and the others have no room for its members.

        The command starts ``rlmesh launch`` on another machine, with variables from its environment:
        ``RLMESH_NODE_RANK``,
        ``RLMESH_NNODES``, ``RLMESH_RDZV_ENDPOINT``, ``RLMESH_JOB_ID``, ``RLMESH_LOST_NODE``. Members wait for the
        machine for
        ``limits(node_wait_s=…)``, by default five minutes.
        """
        self._fields["relaunch"] = command
        return self

    def build(self) -> DLJob:
        """Return the job's description.

        Raises:
            JobSpecError: it cannot work; lists all faults with key, value and nearest valid name.
        """
        self._report_unused_role()
        problems = list(self._problems)
        workloads, broken = self._describe_roles(problems)
        job = DLJob(**self._valid_fields(problems), workloads=workloads)
        job.separations = self._separations(problems)
        if workloads or not problems:
            problems += job.problems()
        job.collocations = [set(roles) for roles in self._collocations(workloads, problems)]
        problems += collocation_problems(job.collocations, workloads, broken)
        job.fusions = [set(map(self._spelled, roles)) for roles in self._fused]
        problems += fusion_problems(job.fusions, workloads, job.separations, broken)
        if job.collocations and job.separations:
            said = set(problems)
            checked = placing_problems(workloads, job.separations, job.pools, job.collocations)
            problems += [problem for problem in checked if problem not in said]
        problems += self._job_problems({*workloads, *broken})
        if problems:
            raise JobSpecError(problems)
        return job

    def _job_problems(self, roles: set[str]) -> list[str]:
        """Return additional faults of this kind of job."""
        return []

    def _describe_roles(self, problems: list[str]) -> tuple[dict[str, AnyWorkloadDesc], set[str]]:
        """Return the descriptors of all valid roles, and the names of the others."""
        workloads: dict[str, AnyWorkloadDesc] = {}
        broken: set[str] = set()
        speaks_of_devices = not {"device_per_node", "device_type"}.isdisjoint(self._fields)
        default = ResourceDesc(accelerator=1 if speaks_of_devices else 0)
        for builder in self._roles:
            role = builder.role_name
            if role in workloads or role in broken:
                problems.append(f"role {role}: is defined twice")
                continue
            pool = self._pools().get(role.lower())
            if pool is not None:
                builder.use_pool(*pool)
            workload = builder.describe(ResourceDesc(accelerator=1) if pool else default, problems)
            if workload is None:
                broken.add(role)
                continue
            if isinstance(workload, ElasticWorkloadDesc):
                workload.comm_pre_check = self._node_check
            workloads[role] = workload
        return workloads, broken

    def _pools(self) -> dict[str, tuple[str, Sequence[int]]]:
        """Return a mapping: role in lower case → (pool, its sizes), for the roles that are mapped to a pool."""
        pools = self._fields.get("pools", {})
        return {role.lower(): (pool, pools.get(pool, ())) for role, pool in self._pool_of.items()}

    def _separations(self, problems: list[str]) -> list[SeparationDesc]:
        found = []
        for roles, by in self._apart:
            try:
                found.append(SeparationDesc(roles=set(map(self._spelled, roles)), by=by))
            except SpecError as error:
                problems += [f"separation of {', '.join(roles)}: {problem}" for problem in error.problems]
        return found

    def _valid_fields(self, problems: list[str]) -> dict[str, Any]:
        """Return the job's valid settings; faults of the others are added to ``problems``."""
        valid: dict[str, Any] = {}
        for name, value in {**self._fields, "global_env": self._global_env}.items():
            try:
                DLJob(**{name: value})
                valid[name] = value
            except SpecError as error:
                problems += error.problems
        return valid

    def _collocations(self, workloads: Mapping[str, AnyWorkloadDesc], problems: list[str]) -> list[tuple[str, ...]]:
        """Return the sets of roles that share accelerators, in the roles' own spelling."""
        sets = [tuple(map(self._spelled, roles)) for roles in self._together]
        if self._all_but is not None:
            excluded = set(map(self._spelled, self._all_but))
            sharing = (role for role, workload in workloads.items() if workload.resource.accelerator > 0)
            together = tuple(role for role in sharing if role not in excluded)
            if len(together) > 1:
                sets.append(together)
            else:
                problems.append(
                    "with_collocation_all: needs at least two roles that use accelerators, and there is "
                    f"{together[0] if together else 'none'}: give them resource(accelerator=...) or the job "
                    "device_per_node(...)"
                )
        return sets

    def _spelled(self, role: str) -> str:
        names = {builder.role_name.lower(): builder.role_name for builder in self._roles}
        name, slash, group = role.partition("/")
        return names.get(name.lower(), name) + slash + group

    def _add(self, builder: RoleT) -> RoleT:
        self._roles.append(builder)
        return builder

    def _take_role(self, method: str) -> str:
        role, self._role = self._role, None
        if role is not None:
            return role
        if method != "train":
            self._problems.append(f"{method}(): name the role first: .role('WORKER').{method}(...)")
        return ELASTIC_ROLE

    def _report_unused_role(self) -> None:
        if self._role is not None:
            self._problems.append(
                f"role {self._role}: has no entry point: follow .role({self._role!r}) with .run(...) or .train(...)"
            )
            self._role = None
