"""Plans keep the rules, and a job is refused only if there is no way; both checked against the plain rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlmesh.errors import PlacementError
from rlmesh.placement.demand import JobDemand, RoleDemand, Separation
from rlmesh.placement.machine.inventory import Device, NodeInfo
from rlmesh.placement.planner import make_plan
from tests.placement.rules import assignments, broken, members, possible, shares, spots

Cluster = list[tuple[int, int]]
"""Devices and cores of each node."""


def nodes_of(cluster: Cluster) -> list[NodeInfo]:
    return [
        NodeInfo(r, f"n{r}", "h", "", 1, cpus, 8 * 2**30,
                 tuple(Device(i, f"GPU-{r}-{i}", "gpu") for i in range(devices)))
        for r, (devices, cpus) in enumerate(cluster)
    ]  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn, *, most: int) -> JobDemand:
    """A job of at most so many members."""
    roles: list[RoleDemand] = []
    left = most
    for i in range(draw(st.integers(1, 3))):
        if not left:
            break
        share = draw(st.sampled_from([0, 100, 333, 400, 500, 600, 700, 1000, 1000, 2000]))
        cpu = draw(st.sampled_from([0, 500, 1000, 3000]))
        memory = draw(st.sampled_from([0, 2**30, 5 * 2**30]))
        pinned = ("n0",) if draw(st.integers(0, 5)) == 0 else ()
        kind = draw(st.sampled_from(["simple", "elastic", "together"]))
        count = draw(st.integers(1, left))
        if kind == "elastic":
            per_node = draw(st.integers(1, 2))
            count = max(1, count // per_node) * per_node
            if count > left:
                continue
            role = RoleDemand(f"R{i}", count, per_node, True, share, cpu, memory, nodes=pinned)
        elif kind == "together" and count >= 2:
            count -= count % 2
            role = RoleDemand(f"R{i}", count, None, False, share, cpu, memory, together=2, nodes=pinned)
        else:
            per = draw(st.one_of(st.none(), st.integers(1, 2)))
            role = RoleDemand(f"R{i}", count, per, False, share, cpu, memory, nodes=pinned)
        roles.append(role)
        left -= role.members
    assume(roles)
    keys = [role.key for role in roles]
    collocations: tuple[tuple[str, ...], ...] = ()
    separations: tuple[Separation, ...] = ()
    if len(keys) > 1 and draw(st.booleans()):
        collocations = (tuple(keys[:2]),)
    if draw(st.booleans()):
        chosen = tuple(sorted(draw(st.sets(st.sampled_from(keys), min_size=1, max_size=2))))
        separations = (Separation(chosen, draw(st.sampled_from(["device", "node"]))),)
    return JobDemand(tuple(roles), collocations, draw(st.sampled_from(["GPU", "GPU", "CPU"])), separations=separations)


CLUSTERS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=3)
SMALL = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=2)


UNEVEN = ("the same nproc_per_node", "is not a multiple of", "the same number of devices")
"""Collocations whose members cannot be put side by side one by one: refused as such, wherever they would run."""


@settings(max_examples=300)
@given(jobs(most=8), CLUSTERS)
def test_plans_keep_the_rules(job: JobDemand, cluster: Cluster) -> None:
    nodes = nodes_of(cluster)
    try:
        plan = make_plan(job, nodes)
    except PlacementError as error:
        assert str(error)
        return
    assert broken(job, nodes, spots(plan)) == ""
    assert plan == make_plan(job, list(reversed(nodes)))
    expected = shares(job)
    of_key = {member: role.key for role, member in members(job)}
    for p in plan.placements:
        assert all(share.milli == expected[of_key[p.role, p.rank]] for share in p.devices)
        assert len({share.device.uuid for share in p.devices}) == len(p.devices)


@settings(max_examples=250)
@given(jobs(most=4), SMALL)
def test_a_job_is_refused_only_if_there_is_no_way(job: JobDemand, cluster: Cluster) -> None:
    nodes = nodes_of(cluster)
    try:
        make_plan(job, nodes)
    except PlacementError as error:
        if not any(text in str(error) for text in UNEVEN):
            assert not possible(job, nodes), str(error)


@settings(max_examples=200)
@given(jobs(most=6), CLUSTERS, st.integers(0, 2), st.data())
def test_members_that_are_kept_stay(job: JobDemand, cluster: Cluster, lost: int, data: st.DataObject) -> None:
    """A node is lost, the cluster has others: what was elsewhere stays, and the rules hold."""
    nodes = nodes_of([*cluster, *cluster])
    try:
        plan = make_plan(job, nodes_of(cluster))
    except PlacementError:
        return
    kept = [p for p in plan.placements if p.node_rank != lost]
    if data.draw(st.booleans()):  # and somebody else is placed anew
        kept = kept[1:]
    try:
        again = make_plan(job, nodes, pinned=kept, excluded_nodes={lost})
    except PlacementError as error:
        assert str(error)
        return
    assert lost not in {p.node_rank for p in again.placements}
    assert broken(job, nodes, spots(again)) == ""
    before = {(p.role, p.rank): (p.node_rank, p.devices) for p in kept}
    for p in again.placements:
        assert before.get((p.role, p.rank), (p.node_rank, p.devices)) == (p.node_rank, p.devices)


@settings(max_examples=100)
@given(jobs(most=6), CLUSTERS)
def test_keeping_everybody_changes_nothing(job: JobDemand, cluster: Cluster) -> None:
    nodes = nodes_of(cluster)
    try:
        plan = make_plan(job, nodes)
    except PlacementError:
        return
    assert make_plan(job, nodes, pinned=plan.placements).placements == plan.placements


def test_the_plain_rules_can_say_no() -> None:
    """Otherwise the tests above would prove nothing."""
    nodes = nodes_of([(2, 4), (2, 4)])
    job = JobDemand((RoleDemand("A", 2, accelerator_milli=600),), separations=(Separation(("A",), "node"),))
    said = [broken(job, nodes, at) for at in assignments(job, nodes)]
    assert "a device is overdrawn" in said
    assert any(text.startswith("Separation") for text in said)
    assert sum(text == "" for text in said) == 8
    assert not possible(replace(job, roles=(RoleDemand("A", 3, accelerator_milli=600),)), nodes)


def test_an_infeasible_device_is_refused_whatever_else_fits() -> None:
    job = JobDemand((RoleDemand("A", 1, accelerator_milli=1000),))
    with pytest.raises(PlacementError):
        make_plan(job, nodes_of([(0, 64)]))
