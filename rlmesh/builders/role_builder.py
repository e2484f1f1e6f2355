"""Builders of one role each. They have the job builder's methods too, so that one chain describes a whole job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rlmesh.errors import UsageError
from rlmesh.job.description.descriptors import (
    AnyWorkloadDesc,
    CustomWorkloadDesc,
    ElasticWorkloadDesc,
    ResourceDesc,
    SimpleWorkloadDesc,
)
from rlmesh.job.description.placement_rules import Apart, GroupDesc, ResourcePoolManager
from rlmesh.job.description.roles import role_name
from rlmesh.job.description.spec import SpecError
from rlmesh.job.entry_points.entry import EntryLike, entry_text
from rlmesh.job.nearest_name import did_you_mean
from rlmesh.job.restarts import Scope

if TYPE_CHECKING:
    from rlmesh.builders.config import DLJob
    from rlmesh.builders.job_builder import DLJobBuilder

__all__ = ["CustomRoleBuilder", "ElasticRoleBuilder", "RoleBuilder", "SimpleRoleBuilder", "UnknownMethod"]

JobT = TypeVar("JobT", bound="DLJobBuilder", covariant=True)


RESOURCE_KEYS = {"cpu", "memory", "mem", "accelerator", "gpu", "acc"}


def joined(before: Any, more: Any) -> Any:
    """Merge two mappings; other values stay as they are, so that ``build()`` can report them."""
    if more is None or not isinstance(before, dict):
        return before
    return {**before, **more} if isinstance(more, Mapping) else more


class UnknownMethod(UsageError, AttributeError):
    """A builder has no method of that name; the message has the nearest one."""

    @classmethod
    def of(cls, builder: object, name: str) -> UnknownMethod:
        if isinstance(builder, RoleBuilder) and hasattr(ElasticRoleBuilder, name):
            return cls(
                f"role {builder.role_name}: {name}() is for elastic roles, which .train(...) defines: use "
                "total(n) and per_node(n) here"
            )
        kinds = (RoleBuilder, ElasticRoleBuilder)
        if not isinstance(builder, RoleBuilder) and any(hasattr(kind, name) for kind in kinds):
            return cls(
                f"{type(builder).__name__} has no method {name!r}: {name}() describes a role that is defined already. "
                f'Say first what runs: .role("NAME").run(Class).{name}(…), or .train(…) or .custom(…) for .run(…)'
            )
        methods = [method for method in dir(type(builder)) if not method.startswith("_")]
        return cls(f"{type(builder).__name__} has no method {name!r}.{did_you_mean(name, methods)}")


class RoleBuilder(Generic[JobT]):
    """One role: number of members, resources and environment variables."""

    _kind: type[AnyWorkloadDesc]

    def __init__(
        self, job: JobT, role: str, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> None:
        self.role_name = role
        self._job = job
        self._entry = (entrypoint, class_name)
        self._fields: dict[str, Any] = {}
        self._env: Any = {}
        self._resource: dict[str, Any] | None = None
        self._groups: dict[str, int | Mapping[str, Any]] = {}
        self._together: int | str | None = None

    if not TYPE_CHECKING:  # hidden, so that type checkers know which methods there are

        def __getattr__(self, name: str) -> Any:
            raise UnknownMethod.of(self, name)

    def total(self, num: int = 1) -> Self:
        """Set the number of members."""
        self._fields["total"] = num
        return self

    def per_node(self, num: int = 1) -> Self:
        """Set the number of members per node: for an elastic role the exact number, for a simple one the maximum."""
        self._fields["per_node"] = num
        return self

    def per_group(self, num: int = 1) -> Self:
        """Set the same as ``per_node``."""
        return self.per_node(num)

    def env(self, env: Mapping[str, str] | None = None) -> Self:
        """Set environment variables of the members; they win over ``global_env``. Several calls add up."""
        self._env = joined(self._env, env)
        return self

    def resource(
        self,
        cpu: float | None = None,
        memory: int | None = None,
        *,
        accelerator: float | None = None,
        **others: Any,
    ) -> Self:
        """Set the resources of each member.

        A role without this call uses one whole accelerator if the job mentions devices at all
        (``device_per_node`` or ``device_type``), else none.

        Args:
            cpu: cores; 0 reserves none.
            memory: MiB; 0 reserves none.
            accelerator: a share of one (0.4) or a whole number of them; 0 if it is left out here.
            others: other spellings: ``mem`` for memory, ``gpu`` and ``acc`` for accelerator.
        """
        named = {"cpu": cpu, "memory": memory, "accelerator": accelerator, **others}
        known = {key: value for key, value in named.items() if value is not None}
        self._resource = {**(self._resource or {}), **known}
        return self

    def restart(self, scope: Scope | None = None, **settings: Any) -> Self:
        """Set the restart policy of this role; wins over the job's ``with_restart``.

        Args:
            scope: what is restarted: the ``member`` alone (the default of simple roles), all members of the
                ``role`` (of elastic ones), the whole ``job``, or ``never``: then the job fails.
            settings: ``max_restarts``, ``window_s``, ``delay_s``, ``max_delay_s``, ``on_error`` of `RestartPolicy`.
        """
        given = {"scope": scope, **settings} if scope is not None else settings
        self._fields["restart"] = {**self._fields.get("restart", {}), **given}
        return self

    def max_restarts(self, num: int) -> Self:
        """Set the maximum number of restarts within the policy's window; 0 is ``restart("never")``."""
        self._fields["max_restarts"] = num
        return self

    def mesh(self, **axes: int) -> Self:
        """Name the axes along which the members are numbered, slowest first, for ``RoleGroup.along``.

        ``mesh(dp=2, tp=4)`` is for eight members: rank 5 is ``dp=1, tp=1``. Without a number of members of its own
        the role has as many as its axes describe.
        """
        self._fields["mesh"] = axes
        return self

    def calls(self, *roles: str | Enum) -> Self:
        """Declare which roles this role's members call, for the job's graph; several calls add up.

        Actual calls are observed as well. A declared edge is known before its first call, so that a failure during the
        start
        names the members that it affects.
        """
        self._fields["calls"] = [*self._fields.get("calls", ()), *map(role_name, roles)]
        return self

    def with_groups(self, **groups: int | Mapping[str, Any]) -> Self:
        """Divide the role into groups, each with a placement and resources of its own.

        ::

            .rollout(Engine).with_groups(
                prefill={"total": 2, "accelerator": 2, "together": 1},
                decode={"total": 8, "accelerator": 1, "nodes": ["big-0", "big-1"]},
            )

        The role's members are numbered through the groups: prefill has ranks 0 and 1, decode 2 to 9. A member finds the
        name of its group in ``current_worker().group``. Collocations and separations name a group
        ``"ROLLOUT/prefill"``.

        Args:
            groups: number of members, or ``total``, ``per_node``, ``together``, ``nodes``, ``devices`` and, for
                each member, ``cpu``, ``memory``, ``accelerator``. Omitted values are the role's.
        """
        self._groups.update(groups)
        return self

    def keep_together(self, axis: int | str) -> Self:
        """Keep members on one node and on devices close to each other.

        Args:
            axis: a number of consecutive members; or the name of an axis of ``mesh``: the members that differ only in
                it and in the axes after it, such as ``"tp"`` of ``mesh(dp=2, tp=4)``: ranks 0 to 3, and 4 to 7.
        """
        self._together = axis
        return self

    def on_nodes(self, *names: str) -> Self:
        """Set the only nodes that the role may run on."""
        self._fields["nodes"] = names
        return self

    def on_devices(self, *names: str) -> Self:
        """Set the only devices that the role may use: by UUID or its beginning, kind (``gpu``, ``mig``) or model."""
        self._fields["devices"] = names
        return self

    def use_pool(self, name: str, sizes: Sequence[int]) -> None:
        """Use the devices of a pool; called by the job's builder, which knows the pools."""
        self._fields["pool"] = name
        asked = {"accelerator": 1, **(self._resource or {})}
        devices = asked.get("gpu", asked.get("acc", asked["accelerator"]))
        each = int(devices) if isinstance(devices, int | float) and 1 <= devices <= sum(sizes) else 1
        if not {"total", "nnodes", "nproc_per_node", "mesh"} & set(self._fields) and sizes and not self._groups:
            self._fields["total"] = max(1, sum(sizes) // each)
            if len(set(sizes)) == 1:
                self._fields.setdefault("per_node", max(1, sizes[0] // each))

    def not_driver(self) -> Self:
        """Let the job not wait for this role's ``run()``."""
        self._fields["is_driver"] = False
        return self

    def end(self) -> JobT:
        """Return the job's builder; a chain may also continue without it."""
        return self._job

    def describe(self, default: ResourceDesc, problems: list[str]) -> AnyWorkloadDesc | None:
        """Return the role's descriptor; faults of the role's own values are added to ``problems``.

        ``default`` is for roles without resources of their own. The result is ``None`` if there are faults
        besides those of ``resource``.
        """
        fields = {"resource": default.model_copy(), **self._fields}
        if self._together is not None:
            fields["together"] = self._members_together(problems)
        if self._resource is not None:
            try:
                fields["resource"] = ResourceDesc(**self._resource)
            except SpecError as error:
                problems += [f"role {self.role_name}: resource.{problem}" for problem in error.problems]
        if self._groups:
            fields["groups"] = self._describe_groups(fields["resource"], problems)
        try:
            return self._kind(entry_point=self._entry_text(), envs=self._env, **fields)
        except SpecError as error:
            problems += [f"role {self.role_name}: {problem}" for problem in error.problems]
        except ValueError as error:
            problems.append(f"role {self.role_name}: entry_point: {error}")
        return None

    def _members_together(self, problems: list[str]) -> Any:
        if not isinstance(self._together, str):
            return self._together  # a number; the descriptor reports anything else
        axes: dict[str, int] = self._fields.get("mesh", {})
        names = list(axes)
        if self._together not in names:
            problems.append(
                f"role {self.role_name}: keep_together: mesh has no axis {self._together!r}."
                f"{did_you_mean(self._together, names)}"
            )
            return 1
        sizes = [axes[name] for name in names[names.index(self._together) :]]
        return prod(sizes) if all(type(size) is int for size in sizes) else 1

    def _describe_groups(self, resource: ResourceDesc, problems: list[str]) -> dict[str, GroupDesc]:
        found: dict[str, GroupDesc] = {}
        for name, given in self._groups.items():
            fields: dict[str, Any] = {"total": given}
            if isinstance(given, Mapping):
                fields = {str(key): value for key, value in given.items()}
            own = {key: fields.pop(key) for key in RESOURCE_KEYS & set(fields)}
            try:
                if own:
                    fields["resource"] = ResourceDesc(**{**resource.model_dump(), **own})
                found[name] = GroupDesc(**fields)
            except SpecError as error:
                problems += [f"role {self.role_name}: group {name}: {problem}" for problem in error.problems]
        return found

    def _entry_text(self) -> str:
        entry, class_name = self._entry
        if entry is None:
            raise ValueError("is missing: give a class, a function, 'module.Class' or a script")
        return entry_text(entry, class_name)

    # The job builder's methods, so that a chain can continue

    def node_num(self, num: int = 1) -> JobT:
        """See the job builder."""
        return self._job.node_num(num)

    def device_per_node(self, num: int = 8) -> JobT:
        """See the job builder."""
        return self._job.device_per_node(num)

    def device_type(self, device_type: str = "GPU") -> JobT:
        """See the job builder."""
        return self._job.device_type(device_type)

    def dl_type(self, dl_type: str = "SFT") -> JobT:
        """See the job builder."""
        return self._job.dl_type(dl_type)

    def config(self, config: Any = None) -> JobT:
        """See the job builder."""
        return self._job.config(config)

    def global_env(self, env: Mapping[str, str] | None = None) -> JobT:
        """See the job builder."""
        return self._job.global_env(env)

    def skip_node_check(self) -> JobT:
        """See the job builder."""
        return self._job.skip_node_check()

    def limits(self, **seconds: float) -> JobT:
        """See the job builder."""
        return self._job.limits(**seconds)

    def with_restart(self, scope: Scope | None = None, **settings: Any) -> JobT:
        """See the job builder."""
        return self._job.with_restart(scope, **settings)

    def role(self, role: str | Enum) -> JobT:
        """See the job builder."""
        return self._job.role(role)

    def by_run_cmd(self, cmd: str) -> JobT:
        """See the job builder."""
        return self._job.by_run_cmd(cmd)

    def with_collocation(self, *roles: str | Enum) -> JobT:
        """See the job builder."""
        return self._job.with_collocation(*roles)

    def with_fusion(self, *roles: str | Enum) -> JobT:
        """See the job builder."""
        return self._job.with_fusion(*roles)

    def with_collocation_all(self, *exclude_roles: str | Enum) -> JobT:
        """See the job builder."""
        return self._job.with_collocation_all(*exclude_roles)

    def run(
        self, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> SimpleRoleBuilder[DLJobBuilder]:
        """See the job builder."""
        return self._job.run(entrypoint, class_name)

    def train(
        self, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> ElasticRoleBuilder[DLJobBuilder]:
        """See the job builder."""
        return self._job.train(entrypoint, class_name)

    def custom(
        self, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> CustomRoleBuilder[DLJobBuilder]:
        """See the job builder."""
        return self._job.custom(entrypoint, class_name)

    def workload(
        self, role: str | Enum, entrypoint: EntryLike | None = None, class_name: str | None = None
    ) -> SimpleRoleBuilder[DLJobBuilder]:
        """See the job builder."""
        return self._job.workload(role, entrypoint, class_name)

    def with_separation(self, *roles: str | Enum, by: Apart = "device") -> JobT:
        """See the job builder."""
        return self._job.with_separation(*roles, by=by)

    def with_pools(
        self, spec: ResourcePoolManager | Mapping[str, Sequence[int]], mapping: Mapping[Any, str] | None = None
    ) -> JobT:
        """See the job builder."""
        return self._job.with_pools(spec, mapping)

    def spare_nodes(self, num: int = 1) -> JobT:
        """See the job builder."""
        return self._job.spare_nodes(num)

    def relaunch(self, command: str) -> JobT:
        """See the job builder."""
        return self._job.relaunch(command)

    def build(self) -> DLJob:
        """See the job builder."""
        return self._job.build()


class SimpleRoleBuilder(RoleBuilder[JobT]):
    """A role of independent members."""

    _kind = SimpleWorkloadDesc


class CustomRoleBuilder(RoleBuilder[JobT]):
    """A role of independent members, given by module and class name."""

    _kind = CustomWorkloadDesc


class ElasticRoleBuilder(RoleBuilder[JobT]):
    """A role that is one SPMD group."""

    _kind = ElasticWorkloadDesc

    def nnodes(self, num: int) -> Self:
        """Set the number of nodes that the group spans."""
        self._fields["nnodes"] = num
        return self

    def nproc_per_node(self, num: int) -> Self:
        """Set the number of members on each node of the group."""
        self._fields["nproc_per_node"] = num
        return self
