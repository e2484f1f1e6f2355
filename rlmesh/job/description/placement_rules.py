"""Placement rules of a job description: groups within a role, separations, pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import AliasChoices, Field, field_serializer

from rlmesh.errors import UsageError
from rlmesh.job.description.resources import MOST, ResourceDesc
from rlmesh.job.description.roles import role_name
from rlmesh.job.description.spec import Spec
from rlmesh.job.nearest_name import did_you_mean

__all__ = ["Apart", "GroupDesc", "ResourcePoolManager", "SeparationDesc", "pools_of"]


Apart: TypeAlias = Literal["device", "node", "spread"]


class GroupDesc(Spec):
    """One group within a role, such as the prefill engines of a rollout role.

    The members of a role are numbered through its groups: the first group has the lowest ranks. Values that a group
    does not
    set are the role's.

    Attributes:
        total: number of members.
        per_node: maximum number of members on one node (of an elastic role: the exact number).
        resource: resources of each member.
        together: number of consecutive members that are always on one node, on devices close to each other.
        nodes: the only nodes that it may run on.
        devices: the only devices that it may use, by UUID or its beginning, kind (``gpu``, ``mig``) or model.
    """

    total: int = Field(default=1, ge=1, le=MOST, validation_alias=AliasChoices("total", "num", "number"))
    per_node: int | None = Field(default=None, ge=1)
    resource: ResourceDesc | None = Field(default=None, validation_alias=AliasChoices("resource", "res"))
    together: int | None = Field(default=None, ge=1)
    nodes: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None


class SeparationDesc(Spec):
    """Roles that are kept apart.

    Attributes:
        roles: names of roles, or ``ROLE/group``. A single one is kept apart from itself: its members.
        by: ``device``: they share no device; ``node``: no node has members of two of them; ``spread``: the members
            of each are divided among as many nodes as the cluster allows.
    """

    roles: set[str]
    by: Apart = "device"

    @field_serializer("roles", mode="plain")
    def _sorted(self, value: set[str]) -> list[str]:
        return sorted(value)


class ResourcePoolManager:
    """Pools of devices, and the roles that use them.

    A pool is a part of the job's devices: a number of devices on each of a number of nodes. The roles of a pool share
    its devices with each other, and with no other role::

        ResourcePoolManager(
            resource_pool_spec={"global_pool": [8, 8]},
            mapping={Role.ActorRollout: "global_pool", Role.Critic: "global_pool"},
        )
    """

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Any, str]) -> None:
        self.resource_pool_spec = _pool_sizes(resource_pool_spec)
        self.mapping: dict[Any, str] = dict(mapping)
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise UsageError(
                    f"ResourcePoolManager: {role} is mapped to pool {pool!r}, which resource_pool_spec does not have."
                    f"{did_you_mean(pool, self.resource_pool_spec)}"
                )

    def get_n_gpus(self) -> int:
        """Return the number of devices of all pools."""
        return sum(sum(sizes) for sizes in self.resource_pool_spec.values())

    def get_resource_pool(self, role: Any) -> tuple[int, ...]:
        """Return the devices per node of a role's pool."""
        return tuple(self.resource_pool_spec[self.mapping[role]])


def pools_of(
    spec: ResourcePoolManager | Mapping[str, Sequence[int]], mapping: Mapping[Any, str] | None
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return pools by name, and pools by role, from either form of arguments.

    Raises:
        UsageError: the arguments have neither form.
    """
    if isinstance(spec, ResourcePoolManager):
        mapping = {**spec.mapping, **(mapping or {})}
        spec = spec.resource_pool_spec
    given: Any = mapping or {}
    if not isinstance(given, Mapping) or not all(isinstance(pool, str) for pool in given.values()):
        raise UsageError(f"the mapping names a pool for each role, such as {{'ACTOR': 'pool'}}, not {mapping!r:.80}")
    return _pool_sizes(spec), {role_name(role): pool for role, pool in given.items()}


def _pool_sizes(spec: Any) -> dict[str, list[int]]:
    """Check the sizes of pools and return them as lists.

    Raises:
        UsageError: they are not sizes of pools.
    """
    if not isinstance(spec, Mapping):
        raise UsageError(f"pools are given as {{'pool': [8, 8]}}, devices on each of its nodes, not as {spec!r:.80}")
    for name, sizes in spec.items():
        if not isinstance(sizes, Sequence) or not all(type(size) is int for size in sizes):
            raise UsageError(f"pool {name!r} is a list of numbers of devices, such as [8, 8], not {sizes!r:.80}")
    return {name: list(sizes) for name, sizes in spec.items()}
