"""Leases of devices: two roles are never awake on one at once, whoever dies, waits too long or changes its mind."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.agent.device_lease_server import DeviceLeaseServer
from rlmesh.errors import LeaseTimeout, PeerLost
from rlmesh.placement.device_leases import LeaseTable, MemberKey
from rlmesh.testing import LocalCluster
from rlmesh.testing.clock import VirtualLoop
from tests.own_time import HANG_S

A, B, C = ("A", 0, 0), ("B", 0, 0), ("C", 0, 0)
D = ("dev-0",)


def alone(key: MemberKey, *devices: str) -> dict[MemberKey, tuple[str, ...]]:
    return {key: devices or D}


def test_turns_come_in_the_order_of_asking() -> None:
    table = LeaseTable()
    assert table.ask(A, alone(A), 0) == [A]
    assert table.ask(B, alone(B), 1) == []
    assert table.ask(C, alone(C), 2) == []
    assert table.give_back(A, 3) == [B]
    assert table.ask(A, alone(A), 4) == []
    assert table.why_not(A, 5) == "B:0 has had dev-0 for 2.0 s; C:0 has waited before it for 3.0 s"
    assert table.give_back(B, 6) == [C]
    assert table.gone(C, 7) == [A]


def test_members_of_one_role_may_share_and_still_wait_their_turn() -> None:
    table = LeaseTable()
    other = ("A", 1, 0)
    assert table.ask(A, alone(A), 0) == [A]
    assert table.ask(other, alone(other), 0) == [other]
    assert table.ask(B, alone(B), 0) == []
    assert table.give_back(A, 0) == []
    assert table.ask(A, alone(A), 0) == []  # B was there before
    assert table.give_back(other, 0) == [B]


def test_a_group_has_its_turn_together() -> None:
    """Else rank 0 of one role and rank 1 of the other would each wait for the other for ever."""
    table = LeaseTable()
    actors = {("ACTOR", r, 0): (f"dev-{r}",) for r in range(2)}
    critics = {("CRITIC", r, 0): (f"dev-{r}",) for r in range(2)}
    assert table.ask(("ACTOR", 0, 0), actors, 0) == [("ACTOR", 0, 0)]
    assert table.ask(("CRITIC", 1, 0), critics, 0) == []
    assert "it is the turn of ACTOR, and ACTOR:1 has not come for it" in table.why_not(("CRITIC", 1, 0), 1)
    assert table.ask(("ACTOR", 1, 0), actors, 0) == [("ACTOR", 1, 0)]
    assert table.give_back(("ACTOR", 1, 0), 0) == []
    assert table.give_back(("ACTOR", 0, 0), 0) == [("CRITIC", 1, 0)]
    assert table.ask(("CRITIC", 0, 0), critics, 0) == [("CRITIC", 0, 0)]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["ask", "back", "gone"]), st.integers(0, 5)), max_size=60)


@settings(max_examples=300)
@given(OPERATIONS, st.booleans())
def test_two_roles_never_hold_one_device(operations: list[tuple[str, int]], grouped: bool) -> None:
    """Six members of three roles on two devices, in any order. Nobody is forgotten either: when all have given back
    what they got, everybody who asked had it."""
    members: list[MemberKey] = [(role, rank, 0) for role in "XYZ" for rank in range(2)]
    devices: dict[MemberKey, tuple[str, ...]] = {key: (f"dev-{key[1]}",) for key in members}
    devices["Z", 1, 0] = ("dev-0", "dev-1")
    table = LeaseTable()
    holds: set[MemberKey] = set()
    waits: set[MemberKey] = set()
    dead: set[MemberKey] = set()

    def note(got: list[MemberKey]) -> None:
        for key in got:
            assert key in waits | holds
            waits.discard(key)
            holds.add(key)
        for device in ("dev-0", "dev-1"):
            assert len({key[0] for key in holds if device in devices[key]}) <= 1
            assert holds & set(members) <= {key for key in members if key not in dead}

    for now, (what, index) in enumerate(operations):
        key = members[index]
        if key in dead:
            continue
        if what == "ask" and key not in holds | waits:
            waits.add(key)
            living = {m: devices[m] for m in members if m[0] == key[0] and m not in dead}
            note(table.ask(key, living if grouped and key[0] != "Z" else {key: devices[key]}, now))
        elif what == "back" and key in holds | waits:
            holds.discard(key)
            waits.discard(key)
            note(table.give_back(key, now))
        elif what == "gone":
            dead.add(key)
            holds.discard(key)
            waits.discard(key)
            note(table.gone(key, now))
    for _ in range(100):
        if not holds and not waits:
            break
        if holds:
            key = min(holds)
            holds.discard(key)
            note(table.give_back(key, 99))
        else:  # a group waits for its others, who come for it, or die
            assert grouped
            key = next(m for m in members if m not in dead and m not in waits)
            dead.add(key)
            note(table.gone(key, 99))
    assert not waits


def virtual(work: Any) -> None:
    """Run a coroutine in virtual time."""
    with VirtualLoop() as loop:
        loop.run(work)


def test_waiting_ends_at_its_deadline_and_says_who_has_it() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        leases = DeviceLeaseServer(loop.time)
        assert (await leases.take(A, alone(A), 1.0)).granted
        answer = await leases.take(B, alone(B), 5.0)
        assert not answer.granted
        assert answer.why == "A:0 has had dev-0 for 5.0 s"
        waiting = asyncio.create_task(leases.take(C, alone(C), 60.0))
        await asyncio.sleep(1.0)
        leases.gone(A)
        answer = await waiting
        assert (answer.granted, answer.waited_s) == (True, 1.0)

    virtual(work())


def test_who_does_not_wait_any_more_is_passed_over() -> None:
    async def work() -> None:
        leases = DeviceLeaseServer(asyncio.get_running_loop().time)
        await leases.take(A, alone(A), 1.0)
        first = asyncio.create_task(leases.take(B, alone(B), 60.0))
        second = asyncio.create_task(leases.take(C, alone(C), 60.0))
        await asyncio.sleep(0.1)
        first.cancel()
        leases.give_back(B)  # as a member does that changed its mind
        again = asyncio.create_task(leases.take(B, alone(B), 60.0))
        await asyncio.sleep(0.1)
        leases.give_back(A)
        assert (await second).granted
        assert not again.done()
        leases.give_back(C)
        assert (await again).granted

    virtual(work())


def test_members_without_devices_wait_for_nothing() -> None:
    async def work() -> None:
        assert (await DeviceLeaseServer().take(A, {A: ()}, 0.0)).granted

    virtual(work())


class Sleeper:
    """An engine that is awake only under its lease, and writes down when."""

    def setup(self) -> None:
        self.log = current_worker().run_dir / "awake.jsonl"

    def _note(self, what: str) -> None:
        worker = current_worker()
        line = json.dumps([what, worker.role, worker.rank, worker.devices, os.getpid()]) + "\n"
        with self.log.open("a") as file:  # one write, which other processes' writes do not come into
            file.write(line)

    @rpc
    def work(self, times: int) -> float:
        waited = 0.0
        for _ in range(times):
            lease = current_worker().device_lease(
                10.0, wake=lambda: self._note("wake"), sleep=lambda: self._note("sleep")
            )
            with lease, current_worker().device_lease():
                self._note("work")
            waited += lease.waited_s
        return waited

    @rpc(concurrent=2)
    async def hold(self) -> None:
        async with current_worker().device_lease(wake=lambda: self._note("wake")):
            await asyncio.sleep(600.0)

    @rpc
    async def impatient(self) -> str:
        try:
            async with current_worker().device_lease(0.2):
                return "got it"
        except LeaseTimeout as error:
            return str(error)


class Conductor:
    def run(self) -> None:
        one, two = RoleGroup[Sleeper]("ONE"), RoleGroup[Sleeper]("TWO")
        futures = [group.call(Sleeper.work, 15) for group in (one, two)]
        for future in futures:
            future.result(60)
        held = [group[0].options(idempotent=False).call(Sleeper.hold) for group in (one,)]
        path = current_worker().run_dir / "awake.jsonl"
        while json.loads(path.read_text().splitlines()[-1])[0] != "wake":
            os.sched_yield()
        said = two[0].call(Sleeper.impatient).result(HANG_S)
        pid = json.loads(path.read_text().splitlines()[-1])[4]
        os.kill(pid, 9)
        try:
            held[0].result(HANG_S)
        except PeerLost:
            said += " and it died"
        said += " and then: " + two[0].call(Sleeper.impatient).result(HANG_S)
        (current_worker().run_dir / "said.txt").write_text(said)


@pytest.mark.parametrize("elastic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_roles_on_the_same_devices_take_turns(tmp_path: Path, elastic: bool) -> None:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("CONDUCTOR").run(Conductor).resource()
    for name in ("ONE", "TWO"):
        if elastic:
            builder.role(name).train(Sleeper).nproc_per_node(2).resource(accelerator=1)
        else:
            builder.role(name).run(Sleeper).total(2).resource(accelerator=1)
    job = builder.with_collocation("ONE", "TWO").with_restart("member").build()
    with LocalCluster(nodes=1, devices_per_node=2, run_root=tmp_path):
        result = job.submit("leases")
    lines = [json.loads(line) for line in (Path(result.run_dir) / "awake.jsonl").read_text().splitlines()]
    awake: dict[str, set[tuple[str, int]]] = {}
    steps = 0
    for what, role, rank, devices, _ in lines:
        for device in devices:
            there = awake.setdefault(device, set())
            if what == "sleep":
                there.discard((role, rank))
            else:
                there.add((role, rank))
                assert len({tenant for tenant, _ in there}) == 1, lines
        steps += what == "work"
    assert steps == 4 * 15
    said = (Path(result.run_dir) / "said.txt").read_text()
    assert "TWO:0 did not get virtual-0 within 0.2 s: ONE:0 has had virtual-0 for" in said
    assert "and it died and then: got it" in said
