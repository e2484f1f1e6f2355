"""`InProcessCluster`: a job's roles within one process, for tests of code that makes calls.

There is no launcher, no agent and no other process.

::

    with InProcessCluster() as cluster:
        actors = cluster.serve("ACTOR", Actor(), Actor())
        assert actors.call(Actor.forward, 3).result() == ["3", "3"]

    with InProcessCluster(config={"steps": 3}) as cluster:
        cluster.add("ROLLOUT", Rollout, total=2)    # built and set up as in a job: current_worker() is the member
        cluster.run("TRAINER", Trainer)             # its run(), here
        assert cluster.reports[-1].metrics["reward_mean"] > 0.5

    with VirtualLoop() as loop:
        loop.run(main())

    async def main():
        async with InProcessCluster(plan=FaultPlan(drop=0.1)) as cluster:
            cluster.serve("ACTOR", Actor())
            await train()               # which calls RoleGroup("ACTOR")

Each member has its own runtime. Messages are encoded, authenticated and decoded as in a job, and use a transport of
your choice.
"""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Literal, get_args

from rlmesh.errors import RoleNotFound, UsageError
from rlmesh.job.context import JobInfo
from rlmesh.job.status import Alarm, ExitInfo, MetricRecord
from rlmesh.runtime.argument_types import require, require_choice
from rlmesh.runtime.axes import Axes
from rlmesh.runtime.connections import network as networks
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress, member_name
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.connections.security import check_key, make_key
from rlmesh.runtime.default_runtime import default_runtime_or_none, set_default_runtime
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.process import clock, forked
from rlmesh.runtime.runtime import Runtime
from rlmesh.testing.acting import ActingMember
from rlmesh.testing.faults import FaultPlan, faulty
from rlmesh.testing.loopback import LoopbackNetwork

TransportName = Literal["loop", "unix", "ipc", "tcp"]

_TAKEN_S = 5.0
"""Timeout of work that is posted to a runtime's thread."""


class InProcessCluster:
    """Objects that are served as members of roles, and a runtime, ``caller``, that calls them.

    With ``with``, each runtime has a loop on its own thread. With ``async with``, all runtimes use the running loop; it
    may be a `VirtualLoop` if the served methods are ``async def``. Within the block, ``RoleGroup("ACTOR")`` finds the
    cluster's members.

    Args:
        transport: transport of messages: ``loop`` (no sockets), ``unix`` (Unix sockets), ``ipc`` (ZeroMQ over Unix
            sockets) or ``tcp`` (ZeroMQ over TCP, on loopback).
        plan: faults to inject into messages.
        network: limits of the runtimes.
        key: the job's key; None makes one.
        config: value of ``current_worker().job_info.user_config`` in members.

    Attributes:
        reports: records of ``current_worker().report(…)`` in members, in order.
        alarms: records of ``current_worker().alarm(…)``.
    """

    def __init__(
        self, transport: TransportName = "loop", *, plan: FaultPlan | None = None,
        network: NetworkOptions | None = None, key: bytes | None = None, config: Any = None,
    ) -> None:  # fmt: skip
        require_choice("InProcessCluster(transport)", transport, get_args(TransportName))
        require("InProcessCluster(plan=…)", plan, FaultPlan | None, "a FaultPlan")
        require("InProcessCluster(network=…)", network, NetworkOptions | None, "NetworkOptions")
        self.transport = transport
        self.key = make_key() if key is None else check_key(key)
        self.network = _network(transport, plan, network or NetworkOptions())
        self.runtimes: list[Runtime] = []
        self.addresses: list[MemberAddress] = []
        self.meshes: dict[str, Axes] = {}
        self.reports: list[MetricRecord] = []
        self.alarms: list[Alarm] = []
        self._job = JobInfo("in-process", f"w{token_hex(6)}", {} if config is None else config, "CPU")
        self._members: dict[str, ActingMember] = {}
        self._embedded = False
        self._version = 0
        self._stack = ExitStack()

    # Opening and closing.

    def __enter__(self) -> InProcessCluster:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> InProcessCluster:
        self._embedded = True
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runtime in self.runtimes:
            await runtime._drained()
        self.close()

    def _open(self) -> None:
        with ExitStack() as opened:
            self._folder = tempfile.TemporaryDirectory(prefix="rlm-")
            self.socket_dir = Path(opened.enter_context(self._folder))
            opened.callback(set_default_runtime, default_runtime_or_none())
            self.caller = self.start("caller", bind=False)
            set_default_runtime(self.caller)
            self._stack = opened.pop_all()
        forked.forget_in_children(self)

    def forked(self) -> None:
        """Forget members and the folder in a forked child: the parent tears them down."""
        self._members, self._stack = {}, ExitStack()
        self._folder._finalizer.detach()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Call ``teardown()`` of added members, the last one first, and close all runtimes: pending calls fail."""
        try:
            while self._members:
                _, member = self._members.popitem()
                member.hook("teardown")
        finally:
            for runtime in self.runtimes:
                runtime.close()
            self._stack.close()

    def start(self, name: str, *, bind: bool = True) -> Runtime:
        """Start another runtime of the cluster, which serves nothing yet."""
        address = self._address() if bind else False
        if self._embedded:
            runtime = Runtime._make(name, self.key, None, address, None, None, 0, self.network, None)
        else:
            runtime = Runtime.start(name=name, key=self.key, bind=address, network=self.network)
        self.runtimes.append(runtime)
        return runtime

    def _address(self) -> str:
        if self.transport == "tcp":
            return "tcp://127.0.0.1:*"
        return f"{self.transport}://{self.socket_dir}/{len(self.runtimes)}"

    # Members.

    def serve(
        self, role: str, *objects: object, axes: Mapping[str, int] | None = None,
        groups: Mapping[str, int] | None = None,
    ) -> RoleGroup[Any]:  # fmt: skip
        """Serve objects as the members of a role, by rank.

        Args:
            axes: as ``.mesh(dp=2, tp=4)`` of a role, for ``along``.
            groups: as ``.with_groups(prefill=1, decode=2)`` of a role, for ``RoleGroup("ROLLOUT/prefill")``.
        """
        of_rank = _group_of_each(role, len(objects), groups)
        return self._serve(role, [partial(_serve_object, obj) for obj in objects], of_rank, axes)

    def add(
        self, role: str, kind: Callable[[], Any], total: int = 1, *, axes: Mapping[str, int] | None = None,
        groups: Mapping[str, int] | None = None,
    ) -> RoleGroup[Any]:  # fmt: skip
        """Make a role's members as a job makes them: ``kind()``, then ``setup()``, and serve them. In their code,
        ``current_worker()`` is the member; ``teardown()`` is called when the cluster is closed. There is no process
        group: code that uses torch.distributed between ranks needs a `LocalCluster`.

        Args:
            kind: the role's class, built without arguments.
            total: number of members.
            axes, groups: as for `serve`.
        """
        of_rank = _group_of_each(role, total, groups)
        made = [self._make_member(role, kind, rank, total, of_rank[rank]) for rank in range(total)]
        return self._serve(role, [partial(_serve_member, member) for member in made], of_rank, axes)

    def run(self, role: str, kind: Callable[[], Any]) -> Any:
        """Make a member of ``role`` as `add` does, and call its ``run()`` on this thread; returns its object.

        Raises:
            UsageError: under ``async with``, where ``run()`` would block the loop that carries its calls.
        """
        if self._embedded:
            raise UsageError("run() would block the loop that carries its calls: use 'with InProcessCluster()'")
        self.add(role, kind)
        member = self._members[member_name(role, 0)]
        member.hook("run")
        return member.object

    def _make_member(self, role: str, kind: Callable[[], Any], rank: int, total: int, group: str) -> ActingMember:
        name = member_name(role, rank)
        if name in self._members:
            raise UsageError(f"the cluster has a {name} already: add a role once, with all of its members")
        member = ActingMember(
            kind,
            role,
            rank,
            total,
            job=self._job,
            run_dir=self.socket_dir,
            reports=self.reports,
            alarms=self.alarms,
            group=group,
        )
        self._members[name] = member
        return member

    def _serve(
        self, role: str, serving: Sequence[Callable[[Runtime, str], None]], of_rank: Sequence[str],
        axes: Mapping[str, int] | None,
    ) -> RoleGroup[Any]:  # fmt: skip
        if axes is not None:
            self.meshes[role] = Axes.of(dict(axes))
        for rank, serve in enumerate(serving):
            name = member_name(role, rank)
            runtime = self.start(name)
            serve(runtime, name)
            self.addresses.append(MemberAddress(role, rank, 0, runtime.endpoint, group=of_rank[rank]))
        self.publish()
        return RoleGroup(role, runtime=self.caller)

    def kill(self, role: str, rank: int) -> None:
        """End a member abruptly, as SIGKILL would, and report its end to the others, as their agent would."""
        name = member_name(role, rank)
        for runtime in self.runtimes:
            if runtime.name == name:
                break
        else:
            raise RoleNotFound(f"the cluster serves no {name}")
        self.runtimes.remove(runtime)
        self._members.pop(name, None)
        runtime.close()
        how = ExitInfo(role, rank, 0, 0, None, signal.SIGKILL, clock.epoch(), hostname="in-process")
        for other in self.runtimes:
            other.member_lost(how)
        self._settle()

    def publish(self, *more: MemberAddress) -> None:
        """Send the address book to all runtimes, with additional members."""
        self.addresses += more
        self._version += 1
        book = AddressBook(self._version, tuple(self.addresses), tuple(self.meshes.items()))
        for runtime in self.runtimes:
            runtime.set_address_book(book)
        self._settle()

    def _settle(self) -> None:
        """Wait until the runtimes have processed all posted work."""
        if self._embedded:
            return
        for runtime in self.runtimes:
            arrived = threading.Event()
            runtime.post(arrived.set)
            if not arrived.wait(_TAKEN_S):
                raise RuntimeError(f"the loop of {runtime.name} did not turn within {_TAKEN_S:g} s")


def _group_of_each(role: str, total: int, groups: Mapping[str, int] | None) -> list[str]:
    """The name of each member's group."""
    found = [name for name, size in (groups or {"": total}).items() for _ in range(size)]
    if len(found) != total:
        raise UsageError(f"role {role}: its groups have {len(found)} members in all, and it has {total}")
    return found


def _serve_object(obj: object, runtime: Runtime, name: str) -> None:
    runtime.serve(name, obj)


def _serve_member(member: ActingMember, runtime: Runtime, name: str) -> None:
    runtime.serve(name, None, functions=member.functions())


def _network(transport: TransportName, plan: FaultPlan | None, options: NetworkOptions) -> NetworkOptions:
    transports = {**LoopbackNetwork().transports, **options.transports}
    if plan is not None:
        real = {"unix": networks.unix, "ipc": networks.zeromq, "tcp": networks.zeromq, **transports}
        transports[transport] = faulty(real[transport], plan)
    return replace(options, transports=transports)
