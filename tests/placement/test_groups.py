"""Several agents on one machine: who belongs together, and between whom CUDA IPC is refused."""

from __future__ import annotations

import pytest

from rlmesh import DLJobBuilder
from rlmesh.errors import UsageError
from rlmesh.master.context import JobContext, Member
from rlmesh.placement.describe import describe_plan
from rlmesh.placement.machine.inventory import GPU, Device, NodeInfo
from rlmesh.placement.node_groups import hidden_devices, ipc_notes, node_groups
from rlmesh.placement.planner import Placement
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from tests.master.bench import job, role


def agent(rank: int, group: str, *gpus: str, machine: str = "m") -> NodeInfo:
    devices = tuple(Device(n, uuid, GPU) for n, uuid in enumerate(gpus))
    return NodeInfo(rank, f"{group}.{rank}", "box", "", 1, 4, 2**30, devices, machine=machine, group=group)


def test_agents_of_one_machine_are_a_group_and_the_lowest_leads() -> None:
    nodes = [agent(3, "n1"), agent(2, "n1"), agent(0, "n0"), agent(1, "n0"), agent(4, ""), agent(5, "")]
    assert sorted(node_groups(nodes)) == [(0, 1), (2, 3)]
    assert node_groups([agent(0, "n0"), agent(1, "n0", machine="other")]) == [], "same name, another machine"


def test_masks_that_hide_gpus_refuse_cuda_ipc_and_name_the_shape() -> None:
    apart = [agent(0, "n1", "GPU-a"), agent(1, "n1", "GPU-b")]
    assert hidden_devices(*apart)
    (note,) = ipc_notes(apart)
    assert "n1: its 2 agents (n1.0, n1.1) do not see each other's GPUs" in note
    assert "--ntasks-per-node=1 --gpus-per-node=2" in note
    assert "weights go through shared memory instead (channel shm)" in note
    together = [agent(0, "n1", "GPU-a", "GPU-b"), agent(1, "n1", "GPU-a", "GPU-b")]
    assert ipc_notes(together) == ()
    assert ipc_notes([agent(0, "", "GPU-a"), agent(1, "", "GPU-b")]) == ()


def test_members_of_a_group_use_the_addresses_of_their_machine() -> None:
    members = tuple(MemberAddress("A", n, 0, f"unix:///{n}", n, 1, f"tcp://10.0.0.{n // 2}:1") for n in range(4))
    book = AddressBook(1, members, groups=((0, 1), (2, 3)))
    seen = book.seen_from(1)
    assert [member.endpoint for member in seen.members] == ["unix:///0", "unix:///1"] + ["tcp://10.0.0.1:1"] * 2
    assert seen.groups == book.groups
    assert book.seen_from(-1).members[0].endpoint == "tcp://10.0.0.0:1"


def test_the_master_tells_the_groups() -> None:
    context = JobContext(job(role("A", 2)), 0.0)
    context.nodes = {0: agent(0, "n0"), 1: agent(1, "n0")}
    context.members = {("A", 0): Member(Placement("A", 0, 0, 0, 1, 0, 1, (), 0, 0), "log")}
    assert context.new_book().groups == ((0, 1),)


def test_a_plan_says_it_before_anything_starts() -> None:
    builder = DLJobBuilder()
    builder.role("ACTOR").run("tests.agent.roles.Echo").total(4).resource(accelerator=1)
    builder.role("ROLLOUT").run("tests.agent.roles.Echo").total(4).resource(accelerator=1)
    job = builder.with_collocation("ACTOR", "ROLLOUT").build()
    machine: dict[str, object] = {"name": "n", "cpus": 8, "gpus": 4}
    assert job.plan({"nodes": [machine]}).notes == ()
    plan = job.plan({"nodes": [{**machine, "agents": 4}]})
    assert [node.name for node in plan.nodes] == ["n.0", "n.1", "n.2", "n.3"]
    (note,) = plan.notes
    assert "n: its 4 agents (n.0, n.1, n.2, n.3) do not see each other's GPUs" in note
    assert "weights between ACTOR and ROLLOUT go through shared memory instead (channel shm)" in note
    assert "sbatch --ntasks-per-node=1 --gpus-per-node=4" in note
    assert f"note: {note}" in describe_plan(plan)
    with pytest.raises(UsageError, match="agents=3: 8 cpus cannot be divided evenly"):
        job.plan({"nodes": [{**machine, "agents": 3}]})
