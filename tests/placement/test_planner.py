"""The planner: shares add up, limits hold, and what cannot be placed says what is short."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.errors import PlacementError
from rlmesh.placement.demand import JobDemand, RoleDemand, milli
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.planner import Plan, make_plan


def node(rank: int, devices: int = 0, cpus: int = 8, kind: str = "gpu", name: str = "") -> NodeInfo:
    name = name or f"node-{rank}"
    slots = tuple(Device(i, f"{name}/{i}", kind) for i in range(devices))
    return NodeInfo(rank, name, "host", "ipc:///x", 1, cpus, 64 * 2**30, slots)


def where(plan: Plan, role: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(p.node_rank, tuple(s.device.index for s in p.devices)) for p in plan.of(role)]


def test_simple_members_fill_devices_in_order() -> None:
    roles = (RoleDemand("A", members=4, accelerator_milli=1000),)
    plan = make_plan(JobDemand(roles), [node(0, 2), node(1, 2)])
    assert where(plan, "A") == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert [(p.local_rank, p.local_world_size) for p in plan.of("A")] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_shares_of_roles_add_up_on_one_device() -> None:
    roles = (RoleDemand("A", 2, accelerator_milli=400), RoleDemand("B", 1, accelerator_milli=200))
    plan = make_plan(JobDemand(roles), [node(0, 1)])
    assert [(p.role, p.devices[0].milli) for p in plan.placements] == [("A", 400), ("A", 400), ("B", 200)]


def test_elastic_group_takes_the_same_number_on_each_node() -> None:
    roles = (RoleDemand("ACTOR", 4, per_node=2, elastic=True, accelerator_milli=1000),)
    plan = make_plan(JobDemand(roles), [node(0, 4), node(1, 4)])
    assert where(plan, "ACTOR") == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert [(p.group_rank, p.local_rank, p.local_world_size) for p in plan.of("ACTOR")] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]


def test_job_of_one_member_per_node_and_role_fits_exactly() -> None:
    names = ("ACTOR", "ROLLOUT", "REFERENCE")
    roles = tuple(RoleDemand(name, 2, per_node=1, accelerator_milli=1000) for name in names)
    plan = make_plan(JobDemand((RoleDemand("TRAINER"), *roles)), [node(i, 2) for i in range(3)])
    for role in names:
        assert len({p.node_rank for p in plan.of(role)}) == 2


def test_an_uneven_fit_is_found() -> None:
    """One after the other the thirds fill the devices that the halves need."""
    roles = (
        RoleDemand("A", 2, accelerator_milli=300),
        RoleDemand("B", 2, accelerator_milli=700),
        RoleDemand("C", 2, accelerator_milli=500, per_node=1),
        RoleDemand("D", 2, accelerator_milli=500),
    )
    make_plan(JobDemand(roles), [node(0, 2), node(1, 2)])


@pytest.mark.parametrize("n", [2, 3, 6, 7, 11, 13])
@pytest.mark.case("O15")
def test_collocated_roles_share_one_device_exactly(n: int) -> None:
    names = tuple(f"R{i}" for i in range(n))
    roles = tuple(RoleDemand(r, accelerator_milli=1000, cpu_milli=3000, memory_bytes=10**8) for r in names)
    plan = make_plan(JobDemand(roles, collocations=(names,)), [node(0, 1, cpus=40)])
    shares = [p.devices[0].milli for p in plan.placements]
    assert sum(shares) == 1000
    assert max(shares) - min(shares) <= 1
    assert {(p.cpu_milli, p.memory_bytes) for p in plan.placements} == {(3000, 10**8)}


@pytest.mark.parametrize("shares", [(0.1, 0.9), (0.1,) * 10])
@pytest.mark.case("O15")
def test_declared_shares_of_a_collocation_are_kept(shares: tuple[float, ...]) -> None:
    names = tuple(f"R{i}" for i in range(len(shares)))
    roles = tuple(RoleDemand(r, accelerator_milli=milli(s)) for r, s in zip(names, shares, strict=True))
    plan = make_plan(JobDemand(roles, collocations=(names,)), [node(0, 1)])
    assert [p.devices[0].milli for p in plan.placements] == [milli(s) for s in shares]


@pytest.mark.case("O15")
def test_shares_beyond_one_device_are_refused() -> None:
    roles = tuple(RoleDemand(f"R{i}", accelerator_milli=100) for i in range(11))
    with pytest.raises(PlacementError, match=r"1\.1 of a device"):
        make_plan(JobDemand(roles, collocations=(tuple(r.role for r in roles),)), [node(0, 8)])


def test_collocated_members_of_one_rank_are_on_one_device() -> None:
    roles = (
        RoleDemand("ACTOR", 4, per_node=2, elastic=True, accelerator_milli=1000),
        RoleDemand("ROLLOUT", 4, accelerator_milli=1000),
    )
    plan = make_plan(JobDemand(roles, collocations=(("ACTOR", "ROLLOUT"),)), [node(0, 2), node(1, 2)])
    assert where(plan, "ACTOR") == where(plan, "ROLLOUT")
    assert {s.milli for p in plan.placements for s in p.devices} == {500}


@pytest.mark.case("O13")
def test_impossible_cpu_demand_shows_what_is_short() -> None:
    roles = (RoleDemand("rollout", 8, accelerator_milli=1000, cpu_milli=2000),)
    with pytest.raises(PlacementError) as caught:
        make_plan(JobDemand(roles), [node(0, 8, cpus=4, name="A"), node(1, 0, cpus=64, name="B")])
    assert "CPU 16 wanted, 4 there" in str(caught.value)
    assert "GPU 8 wanted, 0 there" in str(caught.value)


@pytest.mark.case("O13")
def test_one_gpu_too_many_is_told() -> None:
    with pytest.raises(PlacementError, match="GPU 9 wanted, 8 there"):
        make_plan(JobDemand((RoleDemand("rollout", 9, accelerator_milli=1000),)), [node(0, 8, cpus=99)])


def test_too_few_nodes_for_an_elastic_role_are_told() -> None:
    roles = (RoleDemand("ACTOR", 4, per_node=2, elastic=True),)
    with pytest.raises(PlacementError, match="2 wanted, 1 there"):
        make_plan(JobDemand(roles), [node(0, 8)])


def test_gpu_job_without_gpu_says_so() -> None:
    with pytest.raises(PlacementError, match=r"no node has a GPU.*device_type\('CPU'\)"):
        make_plan(JobDemand((RoleDemand("A", accelerator_milli=1000),)), [node(0, 0)])


def test_cores_are_soft_on_virtual_slots_and_hard_with_gpus() -> None:
    roles = (RoleDemand("TRAINER", cpu_milli=4000), RoleDemand("A", accelerator_milli=1000))
    plan = make_plan(JobDemand(roles, device_type="CPU"), [node(0, 1, cpus=2, kind="virtual")])
    assert plan.notes == ("node node-0: 4 cores asked, 2 there; its members share them",)
    with pytest.raises(PlacementError, match="CPU 4 wanted, 2 there"):
        make_plan(JobDemand(roles), [node(0, 1, cpus=2)])


def test_slots_are_hard_on_cpu() -> None:
    with pytest.raises(PlacementError, match="slot 3 wanted, 2 there"):
        roles = (RoleDemand("A", 3, accelerator_milli=1000),)
        make_plan(JobDemand(roles, device_type="CPU"), [node(0, 2, kind="virtual")])


def test_job_keeps_to_its_nodes_and_devices() -> None:
    roles = (RoleDemand("A", 2, accelerator_milli=1000),)
    plan = make_plan(JobDemand(roles, max_nodes=2, max_devices_per_node=1), [node(i, 8) for i in range(4)])
    assert where(plan, "A") == [(0, (0,)), (1, (0,))]
    with pytest.raises(PlacementError):
        make_plan(JobDemand(roles, max_nodes=1, max_devices_per_node=1), [node(i, 8) for i in range(4)])


def test_a_share_above_one_must_be_whole() -> None:
    with pytest.raises(PlacementError, match=r"role A asks 1\.5"):
        make_plan(JobDemand((RoleDemand("A", accelerator_milli=1500),)), [node(0, 8)])


@st.composite
def jobs(draw: st.DrawFn) -> JobDemand:
    roles = []
    for i in range(draw(st.integers(1, 4))):
        share = draw(st.sampled_from([0, 100, 333, 400, 500, 700, 1000, 2000]))
        cpu = draw(st.sampled_from([0, 500, 2000]))
        if draw(st.booleans()):
            per_node = draw(st.integers(1, 2))
            members = per_node * draw(st.integers(1, 3))
            roles.append(RoleDemand(f"R{i}", members, per_node, True, share, cpu))
        else:
            per = draw(st.one_of(st.none(), st.integers(1, 2)))
            roles.append(RoleDemand(f"R{i}", draw(st.integers(1, 4)), per, False, share, cpu))
    together = draw(st.sets(st.sampled_from([r.role for r in roles])))
    collocations = (tuple(sorted(together)),) if len(together) > 1 else ()
    return JobDemand(tuple(roles), collocations, draw(st.sampled_from(["CPU", "GPU"])))


@settings(max_examples=150, deadline=None)
@given(jobs(), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=3))
def test_every_plan_keeps_the_rules(job: JobDemand, cluster: list[tuple[int, int]]) -> None:
    nodes = [node(i, devices, cpus) for i, (devices, cpus) in enumerate(cluster)]
    try:
        plan = make_plan(job, nodes)
    except PlacementError as error:
        assert str(error)
        return
    assert plan == make_plan(job, list(reversed(nodes)))
    expected = Counter((r.role, rank) for r in job.roles for rank in range(r.members))
    assert Counter((p.role, p.rank) for p in plan.placements) == expected
    used: Counter[tuple[int, int]] = Counter()
    for p in plan.placements:
        for share in p.devices:
            assert share.device in nodes[p.node_rank].devices
            used[p.node_rank, share.device.index] += share.milli
    assert all(total <= 1000 for total in used.values())
    for role in job.roles:
        on_node = Counter(p.node_rank for p in plan.of(role.role))
        assert role.per_node is None or max(on_node.values()) <= role.per_node
        assert not role.elastic or set(on_node.values()) == {role.per_node}
    if job.device_type == "GPU" and any(n.devices for n in nodes):
        for n in nodes:
            assert sum(p.cpu_milli for p in plan.on(n.node_rank)) <= n.cpus * 1000
    for names in job.collocations:
        by_rank: dict[int, set[tuple[int, tuple[str, ...]]]] = {}
        for p in plan.placements:
            if p.role in names:
                by_rank.setdefault(p.rank, set()).add((p.node_rank, tuple(s.device.uuid for s in p.devices)))
        assert all(len(places) == 1 for places in by_rank.values())
