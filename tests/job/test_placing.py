"""Groups, separations and pools in builders: what they become, and how wrong use is told."""

from __future__ import annotations

from enum import Enum

import pytest

from rlmesh import DLJobBuilder
from rlmesh.errors import JobSpecError, UsageError
from rlmesh.job.description.placement_rules import ResourcePoolManager
from rlmesh.placement.demand import Pool, RoleDemand, Separation
from rlmesh.placement.preview import demand_of


class Role:
    def run(self) -> None: ...


class Roles(Enum):
    """As users of pools name theirs."""

    ActorRollout = 2
    Critic = 3


def test_pools_give_their_roles_a_member_per_device() -> None:
    manager = ResourcePoolManager(
        resource_pool_spec={"global_pool": [8] * 2},
        mapping={Roles.ActorRollout: "global_pool", Roles.Critic: "global_pool"},
    )
    assert manager.get_n_gpus() == 16
    assert manager.get_resource_pool(Roles.Critic) == (8, 8)
    builder = DLJobBuilder().with_pools(manager)
    builder.role(Roles.ActorRollout).train(Role)
    builder.role(Roles.Critic).train(Role).resource(accelerator=2)
    builder.role("Trainer").run(Role)
    job = builder.build()
    demand = demand_of(job)
    assert demand.pools == (Pool("global_pool", (8, 8)),)
    assert demand.roles[:2] == (
        RoleDemand("ActorRollout", 16, 8, True, 1000, pool="global_pool"),
        RoleDemand("Critic", 8, 4, True, 2000, pool="global_pool"),
    )
    plan = job.plan({"nodes": [{"name": "g", "count": 2, "gpus": 8, "cpus": 8}]})
    assert [s.device.uuid for s in plan.of("Critic")[1].devices] == ["GPU-g-0-2", "GPU-g-0-3"]
    assert demand.sharing("Critic") == ("ActorRollout", "Critic")


def test_wrong_pools_are_refused() -> None:
    with pytest.raises(UsageError, match=r"pool 'globl'.*Did you mean 'global'"):
        ResourcePoolManager({"global": [8]}, {"A": "globl"})
    builder = DLJobBuilder().with_pools({"p": [0]}, {"a": "q"})
    builder.role("A").run(Role)
    with pytest.raises(JobSpecError) as caught:
        builder.build()
    assert "pools.p: [0] must be numbers of devices above 0" in str(caught.value)
    assert "role A: pool: there is no pool 'q'" in str(caught.value)


def test_groups_number_the_members_through() -> None:
    builder = DLJobBuilder()
    builder.role("ROLLOUT").run(Role).resource(cpu=2, accelerator=1).with_groups(
        prefill={"total": 2, "accelerator": 2, "nodes": ["big"]}, decode=3
    )
    builder.role("ACTOR").train(Role).nnodes(1).nproc_per_node(3).resource(accelerator=0.5)
    builder.with_separation("rollout/prefill", "ACTOR", by="node").with_collocation("ACTOR", "ROLLOUT/decode")
    job = builder.build()
    assert job.workloads["ROLLOUT"].total == 5
    demand = demand_of(job)
    assert demand.roles[:2] == (
        RoleDemand("ROLLOUT", 2, cpu_milli=2000, accelerator_milli=2000, group="prefill", nodes=("big",)),
        RoleDemand("ROLLOUT", 3, cpu_milli=2000, accelerator_milli=1000, group="decode", first_rank=2),
    )
    assert demand.separations == (Separation(("ROLLOUT/prefill", "ACTOR"), "node"),)
    assert demand.collocations == (("ROLLOUT/decode", "ACTOR"),)
    again = type(job).model_validate_json(job.model_dump_json())
    assert demand_of(again) == demand


def test_wrong_groups_and_separations_are_all_told() -> None:
    builder = DLJobBuilder()
    builder.role("R").run(Role).total(4).with_groups(a=1, b={"total": 2, "acelerator": 1})
    builder.role("S").run(Role).resource(accelerator=0.5)
    builder.with_separation("R/c").with_separation("S", by="rack")  # type: ignore[arg-type]
    builder.with_collocation("R", "S")
    with pytest.raises(JobSpecError) as caught:
        builder.build()
    text = str(caught.value)
    assert "role R: group b: acelerator: there is no such key." in text, text
    assert "separation of R/c: the job has no role 'R/c'" in text, text
    assert "separation of S: by:" in text, text
    assert "role R has groups: name one of R/a" in text, text
    builder = DLJobBuilder()
    builder.role("R").run(Role).total(4).with_groups(a=1, b=2)
    with pytest.raises(JobSpecError, match="groups: they have 3 members in all, and the role has 4"):
        builder.build()


def test_members_of_an_axis_are_kept_together() -> None:
    builder = DLJobBuilder()
    builder.role("A").train(Role).mesh(pp=2, dp=2, tp=4).keep_together("dp")
    builder.role("B").run(Role).total(4).keep_together(2)
    assert [role.together for role in demand_of(builder.build()).roles] == [8, 2]
    builder = DLJobBuilder()
    builder.role("A").train(Role).mesh(dp=2, tp=4).keep_together("tpp")
    with pytest.raises(JobSpecError, match=r"mesh has no axis 'tpp'.*Did you mean 'tp'"):
        builder.build()


def test_collocated_and_apart_is_a_contradiction() -> None:
    builder = DLJobBuilder()
    builder.role("A").run(Role).resource(accelerator=0.5)
    builder.role("B").run(Role).resource(accelerator=0.5)
    builder.with_collocation("A", "B").with_separation("A", "B")
    with pytest.raises(JobSpecError, match="A and B are to share devices as well"):
        builder.build()


def test_nodes_devices_and_spares_are_in_the_demand() -> None:
    builder = DLJobBuilder().spare_nodes(2)
    builder.role("A").run(Role).resource(accelerator=1).on_nodes("x", "y").on_devices("h100")
    demand = demand_of(builder.build())
    assert (demand.spare_nodes, demand.roles[0].nodes, demand.roles[0].devices) == (2, ("x", "y"), ("h100",))
