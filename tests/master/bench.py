"""A job under test: feeds events to a JobManager and plays the nodes and the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rlmesh.job.entry import Entry
from rlmesh.job.status import ExitInfo
from rlmesh.master import events as ev
from rlmesh.master.job_manager import JobManager
from rlmesh.master.jobspec import JobSpec, Limits, RoleSpec
from rlmesh.master.scheduler import Scheduler, Site
from rlmesh.placement.demand import JobDemand, RoleDemand
from rlmesh.placement.inventory import Device, NodeInfo

A = TypeVar("A")
LIMITS = Limits(agents_s=10, start_s=20, setup_s=30, teardown_s=15, settle_s=0.3, fail_grace_s=1, exit_s=5)


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


def role(name: str, members: int = 1, backend: str = "simple", driver: bool | None = None) -> RoleSpec:
    return RoleSpec(name, Entry("class", "m", name), backend, members, driver=driver)


class Bench:
    """One job at a time that moves only when told to. ``has_run``: roles with ``run()``."""

    def __init__(self, spec: JobSpec, has_run: Iterable[str] = ("TRAINER",)) -> None:
        self.now = 100.0
        site = Site("00", "ipc:///tmp/s/master")
        self.manager = JobManager(spec, Scheduler(spec, site), self.now, lambda path: (f"end of {path}",))
        self.has_run = set(has_run)
        self.actions: list[ev.Action] = []

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

    def member(self, name: str):  # type: ignore[no-untyped-def]
        role_name, _, rank = name.partition(":")
        return self.manager.context.members[role_name, int(rank or 0)]

    def register(self) -> None:
        for rank in range(self.manager.context.spec.nnodes):
            self.send(ev.AgentRegistered(node(rank)))
        for action in self.took(ev.ReservePort):
            self.send(ev.PortReserved(action.role, 29500))

    def names(self) -> list[str]:
        return [f"{name}:{rank}" for name, rank in self.manager.context.members]

    def bind(self, name: str) -> None:
        role_name, _, rank = name.partition(":")
        pid = 1000 + self.names().index(name)
        self.send(ev.MemberBound(role_name, int(rank), 0, pid, f"ipc:///tmp/{name}"))

    def ready(self, name: str) -> None:
        role_name, _, rank = name.partition(":")
        self.send(ev.MemberReady(role_name, int(rank), 0))

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
        self.send(ev.RunFinished(role_name, int(rank), 0))

    def fail(self, name: str, error: str = "ValueError: no", *, from_call: bool = False) -> list[ev.Action]:
        role_name, _, rank = name.partition(":")
        return self.send(ev.MemberFailed(role_name, int(rank), 0, error, "Traceback …", from_call))

    def exit(self, name: str, code: int | None = 0, signal: int | None = None, after_s: float = 0.0) -> None:
        role_name, _, rank = name.partition(":")
        self.now += after_s
        pid = self.member(name).pid
        info = ExitInfo(role_name, int(rank), 0, pid, code, signal, self.now, 0, "box", "log", ("last words",))
        self.send(ev.MemberExited(0, info))

    def exit_all(self) -> None:
        """Everybody who was told to end ends."""
        for name in self.names():
            member = self.member(name)
            if not member.gone and member.asked_to_end:
                self.exit(name, *((None, 15) if member.ended_by_us else (0, None)))
