"""Descriptors of roles: the entry point, the number of members, and their resources.

Each kind of role has a descriptor, distinguished by ``backend``:

- ``ElasticWorkloadDesc`` (``elastic``): one SPMD group. Its members find ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
  ``MASTER_ADDR``, ``MASTER_PORT``, … in their environment, as under torchrun.
- ``SimpleWorkloadDesc`` (``simple``): independent members.
- ``CustomWorkloadDesc`` (``custom``): independent members whose class is given as module and class name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import prod
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, Field, PrivateAttr, field_validator, model_validator

from rlmesh.job.description.placement_rules import GroupDesc
from rlmesh.job.description.resources import MOST, ResourceDesc
from rlmesh.job.description.restart_policy import RestartPolicy, restart_problems
from rlmesh.job.description.spec import Spec
from rlmesh.job.entry_points.entry import EntryPoint, entry_text
from rlmesh.job.entry_points.resolving import Resolved, resolve_entry

__all__ = [
    "AnyWorkloadDesc",
    "BaseWorkloadDesc",
    "CustomWorkloadDesc",
    "ElasticWorkloadDesc",
    "ResourceDesc",
    "SimpleWorkloadDesc",
    "WorkloadDesc",
]

TORCH_ENV = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""Variables that rlmesh itself sets for the members of an elastic role."""


class BaseWorkloadDesc(Spec):
    """The base of all kinds of roles.

    Attributes:
        entry_point: ``module.Class``, ``module.function`` or ``script.py args``; a class, a function and
            ``(module, class)`` are accepted and turned into text.
        total: number of members.
        per_node: maximum number of members on one node; of an elastic role, the exact number on each of its nodes;
            ``None`` leaves it to the planner.
        resource: resources of each member.
        envs: environment variables of the members; they win over the job's ``global_env``.
        restart: restart policy; ``None``: the job's policy, in which elastic roles restart as a
            group and other members alone. A text is a scope: ``never``, ``member``, ``role``, ``job``.
        max_restarts: replaces the policy's own number; 0 is ``never``.
        groups: groups within the role, such as prefill and decode, each with resources and a placement of its own.
        together: number of consecutive members that are always on one node, on devices close to each other.
        nodes: names of the only nodes that the role may run on; empty: any.
        devices: the only devices that it may use, by UUID or its beginning, kind (``gpu``, ``mig``) or model;
            empty: any.
        pool: the pool whose devices it uses.
        mesh: names and sizes of the axes along which the members are numbered, slowest first; empty without
            axes. Without ``total`` the role has as many members as the axes describe.
        calls: declared callees: roles that its members call.
        is_driver: the job waits for this role's ``run()``; ``None``: the default, which is TRAINER,
            or all roles that have ``run()`` if there is no such role.
    """

    backend: str
    entry_point: str = Field(validation_alias=AliasChoices("entry_point", "entrypoint"))
    total: int = Field(default=1, ge=1, le=MOST, validation_alias=AliasChoices("total", "num", "number"))
    per_node: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("per_node", "per_group"))
    resource: ResourceDesc = Field(default_factory=ResourceDesc, validation_alias=AliasChoices("resource", "res"))
    envs: dict[str, str] = Field(default_factory=dict, validation_alias=AliasChoices("envs", "env", "environment"))
    restart: RestartPolicy | None = None
    max_restarts: int | None = Field(default=None, ge=0, validation_alias=AliasChoices("max_restarts", "max_restart"))
    groups: dict[str, GroupDesc] = Field(default_factory=dict)
    together: int = Field(default=1, ge=1)
    nodes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    pool: str | None = None
    mesh: dict[str, int] = Field(default_factory=dict)
    calls: list[str] = Field(default_factory=list)
    is_driver: bool | None = None

    _resolved: tuple[str, Resolved] | None = PrivateAttr(default=None)

    @field_validator("entry_point", mode="before")
    @classmethod
    def _entry_as_text(cls, value: object) -> str:
        return entry_text(value)

    @model_validator(mode="before")
    @classmethod
    def _total_of_mesh(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(axes := data.get("mesh"), Mapping):
            return data
        sized = {"total", "num", "number", "nnodes", "nproc_per_node"}
        if sized & set(data) or not all(type(size) is int and size > 0 for size in axes.values()):
            return data
        return {**data, "total": prod(axes.values())} if axes else data

    @model_validator(mode="before")
    @classmethod
    def _total_of_groups(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(groups := data.get("groups"), Mapping) or not groups:
            return data
        if {"total", "num", "number", "nnodes", "nproc_per_node", "mesh"} & set(data):
            return data
        sizes = [g.get("total", 1) if isinstance(g, Mapping) else getattr(g, "total", None) for g in groups.values()]
        return {**data, "total": sum(sizes)} if all(type(size) is int for size in sizes) else data

    @field_validator("groups")
    @classmethod
    def _possible_groups(cls, value: dict[str, GroupDesc]) -> dict[str, GroupDesc]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"{name!r} is not a name of a group: letters, digits and _, such as prefill")
        return value

    @field_validator("mesh")
    @classmethod
    def _possible_axes(cls, value: dict[str, int]) -> dict[str, int]:
        for name, size in value.items():
            if not name.isidentifier():
                raise ValueError(f"{name!r} is not a name of an axis: letters, digits and _, such as dp")
            if size < 1:
                raise ValueError(f"{name}={size}: the size of an axis is a whole number above 0")
        return value

    @field_validator("envs", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        return env_texts(value)

    def __eq__(self, other: object) -> bool:
        # The cached entry point is not part of the description.
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @property
    def resolved(self) -> Resolved:
        """The entry point, looked up without importing it.

        It is looked up once per text and stored in the description, because ``__main__`` is another module in another
        process.
        """
        if self._resolved is None or self._resolved[0] != self.entry_point:
            self._resolved = (self.entry_point, resolve_entry(self.entry_point))
        return self._resolved[1]

    @property
    def entry(self) -> EntryPoint:
        """The entry point that the members run."""
        return self.resolved.entry

    def problems(self) -> list[str]:
        """Return the faults of this role by itself, one sentence each, each starting with the key."""
        found = [f"entry_point: {problem}" for problem in self.resolved.problems]
        if self.mesh and prod(self.mesh.values()) != self.total:
            axes = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
            found.append(f"mesh: {axes} is {prod(self.mesh.values())} members, but the role has {self.total}")
        members = sum(group.total for group in self.groups.values())
        if self.groups and members != self.total:
            found.append(f"groups: they have {members} members in all, and the role has {self.total}")
        if self.total % self.together and not self.groups:
            found.append(f"together: {self.total} members cannot be kept together {self.together} by {self.together}")
        return found + restart_problems(self.backend == "elastic", self.restart)


class SimpleWorkloadDesc(BaseWorkloadDesc):
    """A role of independent members."""

    backend: Literal["simple"] = "simple"


class ElasticWorkloadDesc(BaseWorkloadDesc):
    """A role whose members form one SPMD group with ``torch.distributed``'s environment.

    ``nnodes`` and ``nproc_per_node`` may be given in place of ``total`` and ``per_node``. rlmesh sets the
    environment, and leaves ``init_process_group`` to the role, as torchrun does.

    Attributes:
        comm_pre_check: check limits and connections of all nodes before the job starts. The check is left out if
            every elastic role of the job has ``False`` here.
    """

    backend: Literal["elastic"] = "elastic"
    comm_pre_check: bool = True

    @model_validator(mode="before")
    @classmethod
    def _from_nodes(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not ({"nnodes", "nproc_per_node"} & set(data)):
            return data
        rest = dict(data)
        nodes, procs = rest.pop("nnodes", None), rest.pop("nproc_per_node", None)
        for key, value in (("nnodes", nodes), ("nproc_per_node", procs)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{key} must be a whole number of at least 1, not {value!r}")
        if nodes is None and procs is None:
            return rest
        total = rest["total"] if type(rest.get("total")) is int else None
        if procs is None:
            procs = rest["per_node"] if type(rest.get("per_node")) is int else max(1, (total or 1) // nodes)
        if nodes is None:
            nodes = total // procs if total else 1
        for key, value in (("total", nodes * procs), ("per_node", procs)):
            if rest.setdefault(key, value) != value:
                raise ValueError(
                    f"{key}={rest[key]} contradicts nnodes={nodes} and nproc_per_node={procs}: give one or the other"
                )
        return rest

    @property
    def nnodes(self) -> int | None:
        """Nodes that the group spans; ``None`` if the planner decides."""
        return None if self.per_node is None else self.total // self.per_node

    @property
    def nproc_per_node(self) -> int | None:
        return self.per_node

    def problems(self) -> list[str]:
        found = super().problems()
        if self.per_node is not None and self.total % self.per_node:
            found.append(
                f"per_node: {self.total} members cannot be split into nodes of {self.per_node}: "
                "total must be a multiple of per_node"
            )
        return found + [
            f"envs: {name} is set by rlmesh for each member of an elastic role: leave it out"
            for name in sorted(TORCH_ENV & set(self.envs))
        ]


class CustomWorkloadDesc(BaseWorkloadDesc):
    """A role of independent members whose class is given by ``module_name`` and ``class_name``."""

    backend: Literal["custom"] = "custom"

    @model_validator(mode="before")
    @classmethod
    def _from_names(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "module_name" not in data or "class_name" not in data:
            return data
        rest = dict(data)
        rest.setdefault("entry_point", (rest.pop("module_name"), rest.pop("class_name")))
        return rest

    @property
    def module_name(self) -> str:
        return self.entry.module

    @property
    def class_name(self) -> str:
        return self.entry.name


AnyWorkloadDesc: TypeAlias = ElasticWorkloadDesc | SimpleWorkloadDesc | CustomWorkloadDesc
WorkloadDesc: TypeAlias = Annotated[AnyWorkloadDesc, Field(discriminator="backend")]
"""A descriptor of any of the three kinds; in a mapping, ``backend`` names the kind."""


def env_texts(value: object) -> object:
    """Return environment variables with numbers turned into text.

    Raises:
        ValueError: the environment cannot hold a name or a value.
    """
    if not isinstance(value, Mapping):
        return value
    texts: dict[str, str] = {}
    for key, item in value.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise ValueError(f"{key!r} is not a name of an environment variable")
        if isinstance(item, bool) or not isinstance(item, str | int | float) or isinstance(item, Enum):
            raise ValueError(f"{key}={item!r} ({type(item).__name__}) must be text, such as {str(item)!r}")
        if "\0" in str(item):
            raise ValueError(f"{key}={item!r} has a zero byte, which the environment cannot hold")
        texts[key] = str(item)
    return texts
