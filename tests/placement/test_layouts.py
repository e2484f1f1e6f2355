"""Pools, groups, fusion, spread, spares and closeness: what each of them promises, on small clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from rlmesh.errors import PlacementError
from rlmesh.placement.demand import JobDemand, Pool, RoleDemand, Separation
from rlmesh.placement.machine.cluster_file import nodes_of
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.placement.planner import Plan, make_plan
from rlmesh.placement.topology import close_devices


def cluster(count: int, gpus: int = 4, **more: Any) -> tuple[NodeInfo, ...]:
    return nodes_of({"nodes": [{"name": "n", "count": count, "gpus": gpus, "cpus": 32, **more}]})


def at(plan: Plan, role: str) -> list[tuple[int, list[int]]]:
    return [(p.node_rank, [s.device.index for s in p.devices]) for p in plan.of(role)]


def used(plan: Plan) -> Counter[str]:
    total: Counter[str] = Counter()
    for p in plan.placements:
        for share in p.devices:
            total[f"{p.node_rank}/{share.device.index}"] += share.milli
    return total


def test_the_roles_of_a_pool_share_its_devices_rank_by_rank() -> None:
    roles = (
        RoleDemand("ActorRollout", 8, 4, True, 1000, pool="global"),
        RoleDemand("Critic", 8, 4, True, 1000, pool="global"),
        RoleDemand("RefPolicy", 8, 4, True, 1000, pool="global"),
        RoleDemand("Reward", 2, accelerator_milli=1000, pool="small"),
    )
    plan = make_plan(JobDemand(roles, pools=(Pool("global", (4, 4)), Pool("small", (2,)))), cluster(3))
    assert at(plan, "ActorRollout") == at(plan, "Critic") == at(plan, "RefPolicy")
    assert at(plan, "ActorRollout") == [(n, [i]) for n in range(2) for i in range(4)]
    assert at(plan, "Reward") == [(2, [0]), (2, [1])]
    assert {total for where, total in used(plan).items() if where[0] != "2"} == {1000}
    assert sorted(plan.of("Critic")[0].devices[0].milli + plan.of(r)[0].devices[0].milli for r in ("RefPolicy",)) == [
        666
    ]


def test_engines_of_two_devices_and_actors_of_one_share_a_pool() -> None:
    roles = (
        RoleDemand("ACTOR", 4, 4, True, 1000, pool="p"),
        RoleDemand("ROLLOUT", 2, accelerator_milli=2000, pool="p"),
        RoleDemand("OTHER", 1, accelerator_milli=1000),
    )
    plan = make_plan(JobDemand(roles, pools=(Pool("p", (4,)),)), cluster(2))
    assert at(plan, "ROLLOUT") == [(0, [0, 1]), (0, [2, 3])]
    assert at(plan, "OTHER") == [(1, [0])]
    assert {share.milli for p in plan.of("ROLLOUT") for share in p.devices} == {500}


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (RoleDemand("A", 5, accelerator_milli=1000, pool="p"), "pool p has 4 devices, and role A asks for 5 × 1"),
        (RoleDemand("A", 1, accelerator_milli=3000, pool="p"), "it must be a multiple"),
        (RoleDemand("A", 4, 2, True, 1000, pool="p"), "they must be the same"),
        (RoleDemand("A", 1, accelerator_milli=1000, pool="q"), "there is no pool q"),
    ],
)
def test_pools_that_do_not_fit_their_roles(role: RoleDemand, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        make_plan(JobDemand((role,), pools=(Pool("p", (4,)),)), cluster(2))


def test_pools_need_their_nodes() -> None:
    role = RoleDemand("A", 8, accelerator_milli=1000, pool="p")
    with pytest.raises(PlacementError):
        make_plan(JobDemand((role,), pools=(Pool("p", (4, 4)),)), cluster(1, 8))


def test_prefill_and_decode_have_places_of_their_own() -> None:
    roles = (
        RoleDemand("ROLLOUT", 2, accelerator_milli=2000, group="prefill"),
        RoleDemand("ROLLOUT", 4, accelerator_milli=500, group="decode", first_rank=2),
        RoleDemand("ACTOR", 2, accelerator_milli=500),
    )
    demand = JobDemand(
        roles,
        collocations=(("ROLLOUT/decode", "ACTOR"),),
        separations=(Separation(("ROLLOUT/prefill", "ROLLOUT/decode"), "node"),),
    )
    plan = make_plan(demand, cluster(2))
    assert [(p.rank, p.group) for p in plan.of("ROLLOUT")] == [
        (0, "prefill"), (1, "prefill"), (2, "decode"), (3, "decode"), (4, "decode"), (5, "decode")
    ]  # fmt: skip
    assert {node for node, _ in at(plan, "ROLLOUT")[:2]} & {node for node, _ in at(plan, "ROLLOUT")[2:]} == set()
    assert at(plan, "ROLLOUT")[2:4] == at(plan, "ACTOR")
    assert demand.sharing("ACTOR") == ("ROLLOUT", "ACTOR")


def test_tensor_parallel_groups_sit_on_linked_devices() -> None:
    """Ranks 0-1 and 2-3 on a pair each, although single members took one device of the first pair."""
    roles = (RoleDemand("TP", 4, accelerator_milli=1000, together=2), RoleDemand("X", 1, accelerator_milli=1000))
    (node,) = cluster(1, 6, nvlink="pairs")
    plan = make_plan(JobDemand(roles), [node])
    pairs = [[i for _, (i,) in at(plan, "TP")[k : k + 2]] for k in (0, 2)]
    assert all(a // 2 == b // 2 for a, b in pairs)
    stays = make_plan(JobDemand((roles[1],)), [node]).placements
    again = make_plan(
        JobDemand((RoleDemand("TP", 2, accelerator_milli=1000, together=2), roles[1])), [node], pinned=stays
    )
    assert at(again, "TP") == [(0, [2]), (0, [3])]


def test_a_member_of_many_devices_gets_close_ones() -> None:
    (node,) = cluster(1, 8, numa=2, nvlink="none")
    one = RoleDemand("ONE", 1, accelerator_milli=1000)
    stays = make_plan(JobDemand((one,)), [node]).placements
    plan = make_plan(JobDemand((one, RoleDemand("FOUR", 1, accelerator_milli=4000))), [node], pinned=stays)
    assert at(plan, "FOUR") == [(0, [4, 5, 6, 7])]
    assert str(plan.of("FOUR")[0].binding) == "NUMA 1 (CPUs 16-31)"
    assert plan.of("FOUR")[0].binding != plan.of("ONE")[0].binding


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_closeness_is_the_best_there_is(wanted: int) -> None:
    """A ring of two quads, one link between them: no set of four is as close as a quad."""
    links = [[0] * 8 for _ in range(8)]
    for a in range(8):
        for b in range(8):
            if a != b and a // 4 == b // 4:
                links[a][b] = 2
    links[3][4] = links[4][3] = 1
    chosen = close_devices([1, 2, 3, 4, 5, 6, 7], wanted, links, [None] * 8)
    assert len({i // 4 for i in chosen}) == 1
    assert len(set(chosen)) == wanted


def test_fused_roles_are_one_process() -> None:
    roles = (
        RoleDemand("ACTOR", 2, accelerator_milli=1000, cpu_milli=4000, memory_bytes=2**30),
        RoleDemand("REF", 2, accelerator_milli=500, cpu_milli=8000, memory_bytes=2**30),
        RoleDemand("CRITIC", 2, accelerator_milli=1000),
    )
    demand = JobDemand(roles, fusions=(("ACTOR", "REF"),), collocations=(("ACTOR", "CRITIC"),))
    plan = make_plan(demand, cluster(1, 2, memory_gib=64))
    assert at(plan, "ACTOR") == at(plan, "REF") == at(plan, "CRITIC") == [(0, [0]), (0, [1])]
    leader, follower = plan.of("ACTOR")[1], plan.of("REF")[1]
    assert leader.process == follower.process == ("ACTOR", 1)
    assert (leader.cpu_milli, leader.memory_bytes, leader.devices[0].milli) == (8000, 2**31, 500)
    assert (follower.cpu_milli, follower.memory_bytes, follower.devices[0].milli) == (0, 0, 0)
    assert set(used(plan).values()) == {1000}
    with pytest.raises(PlacementError, match="ACTOR has 2, CRITIC has 1"):
        make_plan(JobDemand((roles[0], RoleDemand("CRITIC")), fusions=(("ACTOR", "CRITIC"),)), cluster(1))


@pytest.mark.parametrize(("members", "fullest"), [(4, 1), (5, 2), (8, 2), (9, 3)])
def test_spread_is_as_even_as_can_be(members: int, fullest: int) -> None:
    demand = JobDemand((RoleDemand("R", members),), separations=(Separation(("R",), "spread"),))
    plan = make_plan(demand, cluster(4))
    assert max(Counter(p.node_rank for p in plan.placements).values()) == fullest


def test_spread_gives_way_to_room() -> None:
    nodes = nodes_of({"nodes": [{"name": "big", "gpus": 6, "cpus": 8}, {"name": "small", "gpus": 1, "cpus": 8}]})
    demand = JobDemand((RoleDemand("R", 6, accelerator_milli=1000),), separations=(Separation(("R",), "spread"),))
    assert Counter(p.node_rank for p in make_plan(demand, nodes).placements) == {0: 5, 1: 1}


def test_spares_stay_empty_until_they_are_needed() -> None:
    role = RoleDemand("A", 6, 2, True, 1000)
    demand = JobDemand((role,), spare_nodes=1)
    nodes = cluster(4, 2)
    plan = make_plan(demand, nodes)
    assert {p.node_rank for p in plan.placements} == {0, 1, 2}
    assert [node.name for node in plan.spares] == ["n-3"]
    stays = [p for p in plan.placements if p.node_rank != 1]
    with pytest.raises(PlacementError, match="held back: n-3"):
        make_plan(demand, nodes, pinned=stays, excluded_nodes={1})
    moved = make_plan(demand, nodes, pinned=stays, excluded_nodes={1}, spare_nodes=0)
    assert [p.node_rank for p in moved.of("A")] == [0, 0, 3, 3, 2, 2]
    assert [p.group_rank for p in moved.of("A")] == [0, 0, 1, 1, 2, 2]


def test_a_bad_device_is_left_and_the_others_stay() -> None:
    demand = JobDemand((RoleDemand("A", 3, accelerator_milli=1000),))
    plan = make_plan(demand, cluster(1))
    bad = plan.of("A")[1].devices[0].device.uuid
    stays = [p for p in plan.placements if p.rank != 1]
    moved = make_plan(demand, cluster(1), pinned=stays, excluded_devices={bad})
    assert at(moved, "A") == [(0, [0]), (0, [3]), (0, [2])]
    with pytest.raises(PlacementError, match="A:1 is to stay on device"):
        make_plan(demand, cluster(1), pinned=plan.placements, excluded_devices={bad})
    with pytest.raises(PlacementError, match="A:0 is to stay on node 0"):
        make_plan(demand, cluster(2), pinned=plan.placements, excluded_nodes={0})


def test_devices_are_chosen_by_model_kind_and_uuid() -> None:
    nodes = nodes_of({"nodes": [{"name": "a", "gpus": 2, "gpu_model": "NVIDIA A100"},
                                {"name": "h", "gpus": 2, "gpu_model": "NVIDIA H100 80GB", "virtual": 1}]})  # fmt: skip

    def placed(devices: Sequence[str], members: int = 1) -> list[tuple[int, list[int]]]:
        role = RoleDemand("R", members, accelerator_milli=1000, devices=tuple(devices))
        return at(make_plan(JobDemand((role,)), nodes), "R")

    assert placed(["h100"]) == [(1, [0])]
    assert placed(["GPU-a-1"]) == [(0, [1])]
    assert placed(["virtual"]) == [(1, [2])]
    assert placed(["a100", "virtual"], 3) == [(0, [0]), (0, [1]), (1, [2])]
    with pytest.raises(PlacementError):
        placed(["B200"])


def test_together_must_divide() -> None:
    with pytest.raises(PlacementError, match="cannot be kept together 2 by 2"):
        make_plan(JobDemand((RoleDemand("A", 3, together=2),)), cluster(1))
    with pytest.raises(PlacementError, match="to be kept apart by device"):
        roles = (RoleDemand("A", accelerator_milli=500), RoleDemand("B", accelerator_milli=500))
        make_plan(JobDemand(roles, (("A", "B"),), separations=(Separation(("A", "B")),)), cluster(1))
    with pytest.raises(PlacementError, match="at most 1 may be"):
        make_plan(JobDemand((RoleDemand("A", 2, 2, True),), separations=(Separation(("A",), "node"),)), cluster(3))


def test_a_faulty_device_is_not_used_and_told() -> None:
    from dataclasses import replace

    (node,) = cluster(1, 2)
    node = replace(node, devices=(replace(node.devices[0], fault="broken"), node.devices[1]))
    plan = make_plan(JobDemand((RoleDemand("A", 1, accelerator_milli=1000),)), [node])
    assert at(plan, "A") == [(0, [1])]
    assert plan.notes == ("node n: GPU-n-0 is not used: broken",)
    with pytest.raises(PlacementError, match="GPU-n-0 is not used: broken"):
        make_plan(JobDemand((RoleDemand("A", 2, accelerator_milli=1000),)), [node])
