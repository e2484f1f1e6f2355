"""A job under test: feeds events to a JobManager and plays the nodes and the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.context import Member
from rlmesh.master.decisions.scheduler import Scheduler, Site
from rlmesh.master.job_manager import JobManager
from rlmesh.master.jobspec import JobSpec, RestartRule, RoleSpec, TimeLimits
from rlmesh.placement.demand import JobDemand, RoleDemand
from rlmesh.placement.machine.inventory import Device, NodeInfo

A = TypeVar("A")
NEVER = RestartRule("never")
LIMITS = TimeLimits(agents_s=10, start_s=20, setup_s=30, teardown_s=15, settle_s=0.3, fail_grace_s=1, exit_s=5)


def node(rank: int = 0, devices: int = 4) -> NodeInfo:
    slots = tuple(Device(i, f"v{i}") for i in range(devices))
    return NodeInfo(rank, f"node-{rank}", "box", f"ipc:///tmp/n{rank}/agent", 40 + rank, 4, 2**34, slots)


def job(
    *roles: RoleSpec, nnodes: int = 1, accelerators: int = 0, collocations: tuple[tuple[str, ...], ...] = ()
) -> JobSpec:
    demands = tuple(
        RoleDemand(
            role.name,
            role.members,
            elastic=role.backend == "elastic",
            per_node=role.members if role.backend == "elastic" else None,
            accelerator_milli=accelerators,
        )
        for role in roles
    )
    demand = JobDemand(demands, collocations, device_type="CPU")
    return JobSpec("j1", "toy", "/runs/toy", roles, demand, nnodes, limits=LIMITS, submitted_at=99.0)


def role(
    name: str, members: int = 1, backend: str = "simple", driver: bool | None = None,
    restart: RestartRule = NEVER,
) -> RoleSpec:  # fmt: skip
    return RoleSpec(name, EntryPoint("class", "m", name), backend, members, driver=driver, restart=restart)


class Bench:
    """One job at a time that moves only when told to. ``has_run``: roles with ``run()``."""

    def __init__(self, spec: JobSpec, has_run: Iterable[str] = ("TRAINER",)) -> None:
        self.now = 100.0
        site = Site("00", "ipc:///tmp/s/master")
        self.manager = JobManager(spec, Scheduler(spec, site), self.now, lambda path: (f"end of {path}",))
        self.has_run = set(has_run)
        self.actions: list[ev.Action] = []
        self.reserved = 0

    @property
    def stage(self) -> str:
        return self.manager.context.stage

    def send(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Action]:
        self.now += after_s
        actions = self.manager.handle(event, self.now)
        self.actions += actions
        return actions

    def tick(self, after_s: float) -> list[ev.Action]:
        return self.send(ev.Tick(), after_s)

    def took(self, kind: type[A]) -> list[A]:
        """All actions of a kind so far."""
        return [action for action in self.actions if isinstance(action, kind)]

    def state(self, name: str) -> str:
        state: str = self.member(name).state
        return state

    def member(self, name: str) -> Member:
        role_name, _, rank = name.partition(":")
        return self.manager.context.members[role_name, int(rank or 0)]

    def register(self) -> None:
        for rank in range(self.manager.context.spec.nnodes):
            self.send(ev.AgentRegistered(node(rank)))
        self.reserve()

    def reserve(self) -> None:
        """The ports that were asked for are there."""
        asked = self.took(ev.ReservePort)
        for number in range(self.reserved, len(asked)):
            self.reserved += 1
            self.send(ev.PortReserved(asked[number].role, 29500 + number))

    def names(self) -> list[str]:
        return [f"{name}:{rank}" for name, rank in self.manager.context.members]

    def bind(self, name: str) -> None:
        incarnation = self.member(name).incarnation
        pid = 1000 + self.names().index(name) + 100 * incarnation
        address = f"ipc:///tmp/{name}" + (f".{incarnation}" if incarnation else "")
        self.send(ev.MemberBound(*self.member(name).key, pid, address))

    def ready(self, name: str) -> None:
        role_name, _, rank = name.partition(":")
        member = self.manager.context.members.get((role_name, int(rank)))
        self.send(ev.MemberReady(role_name, int(rank), member.incarnation if member else 0))

    def come_back(self, *names: str) -> None:
        """New processes of these members bind and serve."""
        for name in names:
            self.bind(name)
        for name in names:
            self.ready(name)
        members = self.manager.context.members
        for member in [members[a.member] for a in self.took(ev.BeginRun)]:
            if member.state == "ready":
                self.send(ev.RunBegan(*member.key, member.id[0] in self.has_run))

    def up(self) -> None:
        """Until every member was told to run."""
        self.register()
        for name in self.names():
            self.bind(name)
        for name in self.names():
            self.ready(name)

    def running(self) -> None:
        self.up()
        for action in self.took(ev.BeginRun):
            self.send(ev.RunBegan(*action.member, 0, action.member[0] in self.has_run))

    def finish(self, name: str) -> None:
        role_name, _, rank = name.partition(":")
        member = self.manager.context.members.get((role_name, int(rank)))
        self.send(ev.RunFinished(role_name, int(rank), member.incarnation if member else 0))

    def fail(self, name: str, error: str = "ValueError: no", *, from_call: bool = False) -> list[ev.Action]:
        role_name, _, rank = name.partition(":")
        member = self.manager.context.members.get((role_name, int(rank)))
        incarnation = member.incarnation if member else 0
        return self.send(ev.MemberFailed(role_name, int(rank), incarnation, error, "Traceback …", from_call))

    def exit(
        self, name: str, code: int | None = 0, signal: int | None = None, after_s: float = 0.0,
        incarnation: int | None = None, node_rank: int = 0,
    ) -> None:  # fmt: skip
        """``incarnation`` None: the present one."""
        role_name, _, rank = name.partition(":")
        self.now += after_s
        member = self.member(name)
        which = member.incarnation if incarnation is None else incarnation
        process = (role_name, int(rank), which, member.pid)
        info = ExitInfo(*process, code, signal, self.now, node_rank, "box", "log", ("last words",))

        self.send(ev.MemberExited(0, info))

    def old_ones_go(self) -> None:
        """The processes that were ended for a restart are gone."""
        for action in self.took(ev.EndProcesses):
            for role_name, rank, incarnation in action.processes:
                self.exit(f"{role_name}:{rank}", None, 9, incarnation=incarnation)

    def exit_all(self) -> None:
        """Everybody who was told to end ends."""
        for name in self.names():
            member = self.member(name)
            if not member.gone and member.asked_to_end:
                self.exit(name, *((None, 15) if member.ended_by_us else (0, None)))
