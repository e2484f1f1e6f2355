"""Orders are for the processes that they were given for, whoever carries them out, and whenever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rlmesh.agent.protocol import MemberProcess
from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.context import MemberId
from rlmesh.master.decisions.scheduler import Scheduler, Site
from rlmesh.master.event_loop import EventLoop
from rlmesh.master.job_manager import JobManager
from rlmesh.master.jobspec import JobSpec, RestartRule
from rlmesh.master.state.persistence import Persistence
from rlmesh.master.state.snapshot import Snapshot
from rlmesh.master.state.store import STORE_FILE
from tests.master.bench import job, node, role

TRAINER, FIRST, SECOND = ("TRAINER", 0), ("ROLLOUT", 0), ("ROLLOUT", 1)
MEMBER = RestartRule("member", max_restarts=3)


class Master:
    """One master of a job: what it is told, and the orders that go out."""

    def __init__(self, spec: JobSpec, snapshot: Snapshot, persistence: Persistence) -> None:
        self.manager = JobManager(
            spec, Scheduler(spec, Site("00", "ipc:///tmp/s/master")), 100.0, lambda path: (),
            context=snapshot.context, decisions=snapshot.decisions,
        )  # fmt: skip
        self.orders: list[ev.Action] = []
        self.loop = EventLoop(self.manager, persistence, snapshot, self._take, lambda: 100.0)

    def _take(self, orders: Iterable[tuple[int, ev.Action]]) -> None:
        self.orders = [action for _, action in orders]

    async def hear(self, *events: ev.Event) -> list[ev.Action]:
        """Handle these events in one turn; return the orders, none of which is carried out."""
        for event in events:
            self.loop.post(event)
        await self.loop.turn(0.0)
        return self.orders

    def told_to_run(self) -> list[MemberId]:
        return [order.member for order in self.orders if isinstance(order, ev.BeginRun)]

    def started(self) -> list[tuple[MemberId, ...]]:
        return [order.members for order in self.orders if isinstance(order, ev.Spawn)]


@asynccontextmanager
async def open_master(spec: JobSpec) -> AsyncIterator[Master]:
    persistence = Persistence(Path(spec.run_dir) / STORE_FILE, spec.job_id)
    snapshot = Snapshot.of_rows(await persistence.load(), spec, 100.0)
    yield Master(spec, snapshot, persistence)
    await persistence.close()


def spec_in(folder: Path) -> JobSpec:
    return replace(job(role("TRAINER", restart=MEMBER), role("ROLLOUT", 2, restart=MEMBER)), run_dir=str(folder))


def bound(member: MemberId) -> ev.MemberBound:
    return ev.MemberBound(*member, 0, 1000, f"ipc:///tmp/{member[0]}:{member[1]}")


def died(member: MemberId) -> ev.MemberExited:
    return ev.MemberExited(0, ExitInfo(*member, 0, 1000, None, 9, 100.0, 0))


async def test_no_successor_is_told_to_run_because_the_process_before_it_was_ready(tmp_path: Path) -> None:
    """The process dies as it is told to run: before the order goes out, or before the order is known to have come."""
    for first, then in (([died(FIRST)], []), ([], [died(FIRST)])):
        spec = spec_in(tmp_path / f"{len(first)}")
        (tmp_path / f"{len(first)}").mkdir()
        async with open_master(spec) as master:
            await master.hear(ev.AgentRegistered(node()))
            await master.hear(*map(bound, (TRAINER, FIRST, SECOND)))
            await master.hear(*(ev.MemberReady(*member, 0) for member in (TRAINER, FIRST, SECOND)), *first)
            assert master.told_to_run() == ([TRAINER, SECOND] if first else [TRAINER, FIRST, SECOND])
            await master.hear(*then)
            assert master.manager.context.members[FIRST].incarnation == 1
        async with open_master(spec) as successor:
            successor.loop.reissue()
            assert successor.told_to_run() == [TRAINER, SECOND]


async def test_an_order_to_start_is_not_carried_out_again_for_a_successor(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    async with open_master(spec) as master:
        await master.hear(ev.AgentRegistered(node()))
        assert set(*master.started()) == {TRAINER, FIRST, SECOND}
        await master.hear(died(FIRST))
        assert master.started() == [(FIRST,)]
    async with open_master(spec) as successor:
        successor.loop.reissue()
        assert sorted(map(sorted, successor.started())) == [[FIRST], sorted([TRAINER, SECOND])]


async def test_a_start_that_was_never_carried_out_keeps_no_restart_waiting(tmp_path: Path) -> None:
    """The whole job is restarted while one process starts; the master dies, and nobody ever started that process."""
    restart = RestartRule("job", max_restarts=3)
    spec = replace(job(role("TRAINER", restart=restart), role("ROLLOUT", 2, restart=restart)), run_dir=str(tmp_path))
    async with open_master(spec) as master:
        await master.hear(ev.AgentRegistered(node()))
        await master.hear(died(FIRST))
        (recovery,) = master.manager.decisions.recoveries
        assert set(recovery.outgoing) == {(*TRAINER, 0), (*SECOND, 0)}
    async with open_master(spec) as successor:
        await successor.hear(ev.AgentRegistered(node(), (MemberProcess(*TRAINER, 0, 1000),)))
        (check,) = [order for order in successor.orders if isinstance(order, ev.CheckMembers)]
        assert [(each.role, each.rank, each.incarnation) for each in check.members] == [(*SECOND, 0)]


async def test_a_port_that_is_reserved_again_is_not_given_to_half_of_a_group(tmp_path: Path) -> None:
    spec = replace(job(role("TRAINER"), role("ACTOR", 2, "elastic", restart=MEMBER)), run_dir=str(tmp_path))
    async with open_master(spec) as master:
        await master.hear(ev.AgentRegistered(node()))
        await master.hear(ev.PortReserved("ACTOR", 4001, 0))
        assert master.started(), "with this port"
    async with open_master(spec) as successor:
        successor.loop.reissue()
        assert ev.ReservePort("ACTOR", 0) in successor.orders
        await successor.hear(ev.PortReserved("ACTOR", 4002, 0))
        assert successor.manager.ports == {"ACTOR": 4001}
        await successor.hear(died(("ACTOR", 1)))
        await successor.hear(ev.PortReserved("ACTOR", 4003, 0))
        assert successor.manager.ports == {"ACTOR": 4003}, "the group gets a new one"
