"""Never two copies of a member: leases, lost nodes and orders that come late, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlmesh.agent.node_lease import Lease
from rlmesh.agent.protocol import Grant, MemberProcess
from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.decisions.silent_nodes import MARGIN_S, NodeLeases
from rlmesh.master.jobspec import RestartRule
from rlmesh.master.monitoring.agent_watch import AgentWatch
from rlmesh.placement.demand import JobDemand, RoleDemand
from tests.master.bench import LIMITS, Bench, job, node, role

LEASE_S = 15.0
FENCE_S = MARGIN_S - 1.0
"""The longest that ending the members takes: by the agent, or by the guardian if the agent is stopped."""
STEP_S = 0.5
Key = tuple[str, int, int]


def test_a_lease_lasts_from_when_it_was_asked_for() -> None:
    lease = Lease()
    assert not lease.held(0.0)
    lease.granted(10.0, LEASE_S)
    lease.granted(9.0, LEASE_S)  # an older answer that was overtaken
    assert lease.held(24.9) and not lease.held(25.0)
    lease.end()
    assert not lease.held(11.0)


def test_a_node_is_given_up_after_its_agent_has_given_up() -> None:
    leases = NodeLeases([1], 100.0, LEASE_S)
    found = {now: leases.silent(now) for now in [100.0 + STEP_S * i for i in range(1, 60)]}
    assert min(now for now, nodes in found.items() if nodes) == 100.0 + LEASE_S + MARGIN_S


def test_a_master_that_stood_still_gives_up_nobody_for_it() -> None:
    leases = NodeLeases([1], 100.0, LEASE_S)
    assert not leases.silent(101.0)
    assert not leases.silent(160.0), "it has not listened"
    assert not leases.silent(161.0)
    assert not leases.silent(162.0)
    leases.forget(1)
    assert not leases.silent(500.0)


@dataclass
class Node:
    """One node's agent: what it was told, what runs there, and what is under way to and from it."""

    lease: Lease = field(default_factory=Lease)
    term: int = 0
    running: set[Key] = field(default_factory=set)
    untold: list[Key] = field(default_factory=list)
    ended_by: float | None = None
    cut: bool = False
    inbox: list[tuple[str, Any, Any]] = field(default_factory=list)
    outbox: list[tuple[str, Any]] = field(default_factory=list)


class CutNetwork(RuleBasedStateMachine):
    """A master and three nodes whose cables are cut and mended, and whose messages take as long as they like, in any
    order. Times are virtual. What decides is the code that runs in earnest: ``Lease``, ``NodeLeases`` and
    ``JobManager``; nodes and network are played."""

    @initialize()
    def start(self) -> None:
        rules = RestartRule("member", max_restarts=1000, delay_s=0.5), RestartRule("role", max_restarts=1000)
        roles = (
            role("TRAINER", restart=rules[0]),
            role("A", 2, restart=rules[0]),
            role("G", 2, "elastic", restart=rules[1]),
        )
        demands = RoleDemand("TRAINER"), RoleDemand("A", 2, 1), RoleDemand("G", 2, 1, True)
        spec = replace(job(*roles, nnodes=3), demand=JobDemand(demands, device_type="CPU"))
        self.bench = Bench(replace(spec, limits=replace(LIMITS, lease_s=LEASE_S, start_s=1e6, setup_s=1e6, exit_s=1e6,
                                                        hang_s=1e6, node_wait_s=1e6)))  # fmt: skip
        self.nodes = {rank: Node() for rank in range(3)}
        self.leases = NodeLeases((), self.bench.now, LEASE_S)
        for rank in self.nodes:
            self.register(rank, rank_asked_at=self.bench.now)
        for rank in (*self.nodes, *self.nodes, *self.nodes):
            self.deliver_all(rank)
        assert sum(len(each.running) for each in self.nodes.values()) == 5

    # What the shells do.

    def post(self, event: ev.Event) -> None:
        context = self.bench.manager.context
        for action in self.bench.send(event):
            match action:
                case ev.Spawn(rank, members):
                    keys = [context.members[member].key for member in members]
                    self.nodes[rank].inbox.append(("spawn", keys, context.terms.get(rank, 0)))
                case ev.EndProcesses(rank, keys):
                    self.nodes[rank].inbox.append(("end", list(keys), None))
                case ev.ReservePort(name, rank):
                    self.nodes[rank].inbox.append(("port", name, None))
                case ev.CheckMembers(rank, processes):
                    self.nodes[rank].inbox.append(("check", [(p.role, p.rank, p.incarnation) for p in processes], None))

    def register(self, rank: int, rank_asked_at: float) -> None:
        there = [*self.nodes[rank].running, *self.nodes[rank].untold]
        self.nodes[rank].outbox.append(("register", (rank_asked_at, there)))

    def deliver_all(self, rank: int) -> None:
        while self.nodes[rank].outbox:
            self.at_master(rank, 0)
        while self.nodes[rank].inbox:
            self.at_agent(rank, 0)

    def at_master(self, rank: int, index: int) -> None:
        context, now = self.bench.manager.context, self.bench.now
        what, value = self.nodes[rank].outbox.pop(index)
        match what, value:
            case "register", (asked_at, there):
                if there and rank in context.lost_nodes:
                    self.nodes[rank].inbox.append(("grant", asked_at, Grant(0.0)))
                    return
                self.leases.renew(rank, now)
                self.post(ev.AgentRegistered(node(rank), tuple(MemberProcess(r, n, i, 1) for r, n, i in there)))
                self.nodes[rank].inbox.append(("grant", asked_at, self.grant(rank)))
            case "renew", asked_at:
                if rank in context.lost_nodes:
                    self.nodes[rank].inbox.append(("grant", asked_at, Grant(0.0)))
                    return
                self.leases.renew(rank, now)
                self.nodes[rank].inbox.append(("grant", asked_at, self.grant(rank)))
            case "port", _:
                self.post(ev.PortReserved(str(value), 29500, rank))
            case "up", _:
                name, number, incarnation = value[0]
                self.post(ev.MemberBound(name, number, incarnation, 7, "ipc:///tmp/x"))
                self.post(ev.MemberReady(name, number, incarnation))
            case "exit", key:
                self.nodes[rank].untold.remove(key)
                self.post(ev.MemberExited(rank, self.exit_of(key, rank)))

    def exit_of(self, key: Key, rank: int) -> ExitInfo:
        return ExitInfo(*key, 7, None, 9, self.bench.now, rank)

    def grant(self, rank: int) -> Grant:
        return Grant(LEASE_S, self.bench.manager.context.terms.get(rank, 0))

    def at_agent(self, rank: int, index: int) -> None:
        here, now = self.nodes[rank], self.bench.now
        what, value, more = here.inbox.pop(index)
        if what == "grant":
            assert isinstance(value, float) and isinstance(more, Grant)
            if more.lease_s:
                here.lease.granted(value, more.lease_s)
                here.term = more.term
            else:
                here.lease.end()
        elif what == "spawn":
            assert isinstance(value, list)
            if here.lease.held(now) and here.term == more:
                here.running |= set(value)
                here.outbox += [("up", (key, now)) for key in value]
        elif what == "end":
            assert isinstance(value, list)
            for key in here.running & set(value):
                self.end(rank, key)
        elif what == "check":
            assert isinstance(value, list)
            for key in set(value) - here.running - set(here.untold):
                here.untold.append(key)
                here.outbox.append(("exit", key))
        else:
            here.outbox.append(("port", value))

    def end(self, rank: int, key: Key) -> None:
        self.nodes[rank].running.discard(key)
        self.nodes[rank].untold.append(key)
        self.nodes[rank].outbox.append(("exit", key))

    def connected(self) -> list[int]:
        return [rank for rank, each in self.nodes.items() if not each.cut]

    # What happens.

    @rule(rank=st.integers(1, 2), cut=st.booleans())
    def cable(self, rank: int, cut: bool) -> None:
        self.nodes[rank].cut = cut

    @rule(rank=st.integers(0, 2))
    def renew(self, rank: int) -> None:
        self.nodes[rank].outbox.append(("renew", self.bench.now))

    @rule(rank=st.integers(0, 2))
    def register_anew(self, rank: int) -> None:
        self.register(rank, self.bench.now)

    @precondition(lambda self: any(self.nodes[rank].outbox for rank in self.connected()))
    @rule(data=st.data())
    def message_to_master(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.connected() if self.nodes[rank].outbox]))
        self.at_master(rank, data.draw(st.integers(0, len(self.nodes[rank].outbox) - 1)))

    @precondition(lambda self: any(self.nodes[rank].inbox for rank in self.connected()))
    @rule(data=st.data())
    def message_to_agent(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.connected() if self.nodes[rank].inbox]))
        self.at_agent(rank, data.draw(st.integers(0, len(self.nodes[rank].inbox) - 1)))

    @precondition(lambda self: any(each.running for each in self.nodes.values()))
    @rule(data=st.data())
    def member_dies(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank, each in self.nodes.items() if each.running]))
        self.end(rank, data.draw(st.sampled_from(sorted(self.nodes[rank].running))))

    @rule(steps=st.integers(1, 60), late_s=st.floats(0.0, FENCE_S), quietly=st.booleans())
    def time_passes(self, steps: int, late_s: float, quietly: bool) -> None:
        """The nodes whose cables hold renew in time, unless they are slow."""
        for _ in range(steps):
            self.bench.now += STEP_S
            for rank, each in self.nodes.items():
                if not each.cut and not quietly:
                    self.renew(rank)
                    self.deliver_all(rank)
                if each.lease.held(self.bench.now):
                    each.ended_by = None
                elif each.running:
                    each.ended_by = each.ended_by or self.bench.now - STEP_S + late_s
                    if self.bench.now >= each.ended_by:
                        for key in list(each.running):
                            self.end(rank, key)
            for rank in self.leases.silent(self.bench.now):
                self.leases.forget(rank)
                self.post(ev.AgentLost(rank, "gave no sign of life"))
            self.post(ev.Tick())
            self.nothing_runs_twice()

    @invariant()
    def nothing_runs_twice(self) -> None:
        processes = [(key[:2], rank) for rank, each in getattr(self, "nodes", {}).items() for key in each.running]
        names = [name for name, _ in processes]
        assert len(names) == len(set(names)), f"two copies: {sorted(processes)}"


def test_an_order_from_before_a_node_was_given_up_is_not_carried_out_when_it_is_back() -> None:
    network = CutNetwork()
    network.start()
    (name, rank), at = next((key[:2], at) for at in (1, 2) for key in network.nodes[at].running if key[0] == "A")
    network.end(at, (name, rank, 0))
    network.at_master(at, len(network.nodes[at].outbox) - 1)
    assert network.nodes[at].inbox[-1][0] == "spawn", "it is under way when the cable is cut"
    network.cable(at, True)
    network.time_passes(50, FENCE_S, False)
    assert at in network.bench.manager.context.lost_nodes
    assert network.bench.member(f"{name}:{rank}").placement.node_rank != at
    network.cable(at, False)
    network.deliver_all(at)
    network.register(at, network.bench.now)
    network.at_master(at, len(network.nodes[at].outbox) - 1)
    assert at not in network.bench.manager.context.lost_nodes
    network.at_agent(at, len(network.nodes[at].inbox) - 1)
    assert network.nodes[at].lease.held(network.bench.now)
    network.nodes[at].inbox.append(("spawn", [(name, rank, 1)], 0))  # it comes at last
    network.deliver_all(at)
    network.nothing_runs_twice()


TestNothingRunsTwice = CutNetwork.TestCase
TestNothingRunsTwice.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.case("b20")
def test_a_node_that_was_given_up_gets_no_renewal_before_everybody_knows() -> None:
    """Its members may be on their way elsewhere, while its agent, which stood still, asks whether they may go on."""
    now = [0.0]
    lost: list[int] = []
    watch = AgentWatch("j", lambda rank, how: lost.append(rank), lambda rank: (), lease_s=3.0, clock=lambda: now[0])
    watch.renew(1)
    watch.renew(2)
    while not lost:
        now[0] += 0.5
        watch.renew(2)
        watch.check()
    assert lost == [1] and now[0] == 3.0 + MARGIN_S
    assert watch.is_given_up(1) and not watch.is_given_up(2)
