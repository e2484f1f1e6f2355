"""A lost node: its members are started again elsewhere, by one plan; what happens without room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlmesh.master import events as ev
from rlmesh.master.decisions.replacement import NODE_FAILURES
from rlmesh.master.jobspec import JobSpec, RestartRule, RoleSpec
from rlmesh.placement.demand import JobDemand, RoleDemand
from tests.master.bench import LIMITS, NEVER, Bench, job, node, role

MEMBER = RestartRule("member", max_restarts=20, delay_s=0.0)
GROUP = RestartRule("role", max_restarts=20, delay_s=0.0)


def spread(*more: RoleSpec, nnodes: int = 3, spares: int = 0, wait_s: float = 0.0) -> JobSpec:
    """An elastic role with a rank on each of two nodes, next to TRAINER; one device on each node."""
    roles = (role("TRAINER", restart=MEMBER), role("ACTOR", 2, "elastic", restart=GROUP), *more)
    spec = job(*roles, nnodes=nnodes)
    demands = (RoleDemand("TRAINER"), RoleDemand("ACTOR", 2, 1, True, 1000), *(RoleDemand(r.name) for r in more))
    demand = JobDemand(demands, device_type="CPU", spare_nodes=spares)
    return replace(spec, demand=demand, limits=replace(LIMITS, node_wait_s=wait_s))


class Nodes(Bench):
    def __init__(self, spec: JobSpec, groups: Sequence[str] = ()) -> None:
        super().__init__(spec)
        self.groups = groups or [""] * spec.nnodes

    def come(self, rank: int) -> None:
        self.send(
            ev.AgentRegistered(replace(node(rank, devices=1), group=self.groups[rank], machine=self.groups[rank]))
        )

    def register(self) -> None:
        for rank in range(self.manager.context.spec.nnodes):
            self.come(rank)
        self.reserve()

    def places(self, name: str) -> list[int]:
        members = self.manager.context.members.values()
        return [m.placement.node_rank for m in members if m.placement.role == name]

    def lose(self, rank: int, how: str = "died") -> None:
        self.actions.clear()
        self.reserved = 0
        self.send(ev.AgentLost(rank, how))
        self.reserve()


def test_the_spare_node_takes_over() -> None:
    bench = Nodes(spread(spares=1))
    bench.running()
    assert (bench.places("ACTOR"), bench.places("TRAINER")) == ([0, 1], [0])
    bench.member("ACTOR:1").public = "tcp://10.0.0.2:7000"
    bench.lose(1)
    assert bench.places("ACTOR") == [0, 2]
    assert bench.took(ev.ForgetNode) == [ev.ForgetNode(1)]
    assert bench.took(ev.EndProcesses) == [ev.EndProcesses(0, (("ACTOR", 0, 0),), 0.0)], "the other rank of the group"
    (loss,) = bench.took(ev.AnnounceLoss)
    assert (loss.exit.role, loss.exit.rank, loss.exit.node_rank) == ("ACTOR", 1, 1)
    assert not bench.took(ev.Spawn)
    bench.old_ones_go()
    assert bench.took(ev.Spawn) == [ev.Spawn(0, (("ACTOR", 0),)), ev.Spawn(2, (("ACTOR", 1),))]
    address = bench.took(ev.PublishBook)[-1].book.find("ACTOR", 1)
    assert address is not None and (address.endpoint, address.public) == (None, ""), "nobody calls where it was"
    bench.come_back("ACTOR:0", "ACTOR:1")
    assert (bench.stage, bench.state("TRAINER:0"), bench.member("TRAINER:0").incarnation) == ("running", "running", 0)
    (record,) = bench.manager.status().restarts
    assert record.failure.kind == "NodeLost" and "the agent of node node-1 died" in record.cause
    assert not bench.manager.status().failures


def test_all_members_of_a_node_move_by_one_plan_and_each_role_by_its_policy() -> None:
    bench = Nodes(spread(role("ROLLOUT", restart=MEMBER), spares=1))
    bench.running()
    bench.manager.context.members["ROLLOUT", 0].placement = replace(bench.member("ROLLOUT:0").placement, node_rank=1)
    bench.lose(1)
    assert (bench.places("ACTOR"), bench.places("ROLLOUT")[0] in (0, 2)) == ([0, 2], True)
    assert sorted(record.unit for record in bench.manager.status().restarts) == ["ACTOR", "ROLLOUT:0"]


def test_without_room_the_job_fails_and_says_what_to_do() -> None:
    bench = Nodes(spread(nnodes=2))
    bench.running()
    bench.lose(1, "gave no sign of life for 20 s; its lease is over")
    bench.exit_all()
    assert bench.stage == "failed"
    (failure, *_) = bench.manager.context.failures
    assert "the agent of node node-1 gave no sign of life for 20 s" in failure.message
    assert "ACTOR:1 cannot be moved to other nodes" in failure.message
    assert "spare_nodes(1)" in failure.message


def test_members_without_room_wait_for_a_node() -> None:
    bench = Nodes(spread(nnodes=2, wait_s=30.0))
    bench.running()
    bench.lose(1)
    bench.old_ones_go()
    bench.tick(29.0)
    assert (bench.stage, bench.state("ACTOR:1")) == ("running", "restarting")
    assert not bench.took(ev.Spawn)
    bench.come(1)
    bench.reserve()
    assert bench.took(ev.Spawn) == [ev.Spawn(0, (("ACTOR", 0),)), ev.Spawn(1, (("ACTOR", 1),))]
    bench.come_back("ACTOR:0", "ACTOR:1")
    bench.tick(30.0)
    assert bench.stage == "running"


def test_members_do_not_wait_for_a_node_for_ever() -> None:
    bench = Nodes(spread(nnodes=2, wait_s=30.0))
    bench.running()
    bench.lose(1)
    bench.old_ones_go()
    bench.tick(30.1)
    bench.exit_all()
    assert bench.stage == "failed"
    assert "No node came within 30 s" in bench.manager.context.failures[0].message


def test_the_spare_node_itself_may_be_lost() -> None:
    bench = Nodes(spread(spares=1))
    bench.running()
    bench.lose(2)
    assert bench.stage == "running" and not bench.manager.status().restarts
    bench.lose(1)
    bench.exit_all()
    assert bench.stage == "failed"


def test_a_node_that_came_back_is_used_again() -> None:
    bench = Nodes(spread(spares=1))
    bench.running()
    for lost, expected in ((1, [0, 2]), (2, [0, 1])):
        bench.lose(lost)
        bench.old_ones_go()
        bench.tick(0.1)
        bench.come_back("ACTOR:0", "ACTOR:1")
        assert bench.places("ACTOR") == expected
        bench.come(lost)
    assert bench.manager.context.terms == {1: 1, 2: 1}


def test_what_is_lost_twice_is_lost_once() -> None:
    bench = Nodes(spread(spares=1))
    bench.running()
    bench.lose(1)
    bench.send(ev.AgentLost(1, "has ended"))
    bench.send(ev.ActionFailed(1, "starting ACTOR:1", "PeerLost: gone"))
    bench.send(ev.AgentLost(7, "nobody knows it"))
    bench.tick(1.0)
    assert len(bench.manager.status().restarts) == 1 and bench.stage == "running"


def test_with_policy_never_the_job_ends() -> None:
    spec = spread(spares=1)
    bench = Nodes(replace(spec, roles=(spec.roles[0], replace(spec.roles[1], restart=NEVER))))
    bench.running()
    bench.lose(1)
    bench.exit_all()
    assert bench.stage == "failed"
    assert "ACTOR:1 is not to be restarted (restart policy never)" in bench.manager.context.failures[0].message


def test_the_second_loss_takes_what_the_first_one_had_moved() -> None:
    bench = Nodes(spread(nnodes=4, spares=2))
    bench.running()
    bench.lose(1)  # its port is asked for, and the old process of ACTOR:0 is still there
    bench.send(ev.AgentLost(2, "died"))
    bench.reserve()
    bench.exit("ACTOR:0", None, 9, incarnation=0)
    bench.tick(0.1)
    assert bench.places("ACTOR") == [0, 3]
    bench.come_back("ACTOR:0", "ACTOR:1")
    assert bench.stage == "running"


def test_a_lost_node_answers_no_more() -> None:
    """The old process of a restart ran there."""
    bench = Nodes(spread(spares=1))
    bench.running()
    bench.exit("ACTOR:0", None, 9)
    assert bench.took(ev.EndProcesses)[-1].node_rank == 1
    bench.reserve()
    bench.lose(1)
    bench.tick(0.1)
    assert [action.node_rank for action in bench.took(ev.Spawn)] == [0, 2]


def test_the_nodes_of_a_group_are_left_together() -> None:
    bench = Nodes(spread(nnodes=4, spares=2), groups=["", "rack", "rack", ""])
    bench.running()
    assert bench.places("ACTOR") == [0, 1]
    bench.lose(1)
    assert bench.places("ACTOR") == [0, 3], "not node 2, which shares its fate"
    assert bench.manager.context.set_aside == {2: 1}
    bench.come(1)
    assert not bench.manager.context.set_aside


def test_members_on_the_other_nodes_of_a_group_are_ended() -> None:
    bench = Nodes(spread(nnodes=4, spares=2), groups=["rack", "rack", "", ""])
    bench.running()
    bench.lose(1)
    assert (bench.places("ACTOR"), bench.places("TRAINER")) == ([2, 3], [2])
    ended = {key[:2] for action in bench.took(ev.EndProcesses) for key in action.processes}
    assert ended == {("ACTOR", 0), ("TRAINER", 0)}


@pytest.mark.parametrize("room", [True, False])
def test_a_node_that_fails_again_and_again_is_avoided_where_there_is_room(room: bool) -> None:
    bench = Nodes(spread(spares=int(room), nnodes=2 + room))
    bench.running()
    for _ in range(NODE_FAILURES + 1):
        number = bench.member("ACTOR:1").incarnation
        if bench.places("ACTOR")[1] == 1:
            bench.exit("ACTOR:1", None, 9, node_rank=1)
        bench.reserve()
        bench.exit("ACTOR:0", None, 9, incarnation=number)
        bench.tick(0.1)
        bench.come_back("ACTOR:0", "ACTOR:1")
    assert bench.places("ACTOR") == [0, 2 if room else 1]
    assert bench.stage == "running"


def test_before_the_job_has_started_a_lost_node_ends_it() -> None:
    bench = Nodes(spread())
    bench.come(0)
    bench.lose(0)
    bench.exit_all()
    assert bench.manager.context.failures[0].message.startswith("the agent of node node-0 died")
