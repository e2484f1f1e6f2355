"""A job's roles within one process, for tests of code that makes calls: no launcher, no agent, no other process.

::

    with InProcessCluster() as cluster:
        actors = cluster.serve("ACTOR", Actor(), Actor())
        assert actors.call(Actor.forward, 3).result() == ["3", "3"]

    with VirtualLoop() as loop:
        loop.run(main())

    async def main():
        async with InProcessCluster(plan=FaultPlan(drop=0.1)) as cluster:
            cluster.serve("ACTOR", Actor())
            await train()               # which calls RoleGroup("ACTOR")

Each member has a runtime of its own. Messages are encoded, authenticated and decoded as those of a job are, and pass a
transport of your choice.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from rlmesh.errors import RoleNotFound, UsageError
from rlmesh.job.status import ExitInfo
from rlmesh.runtime import network as networks
from rlmesh.runtime.address import AddressBook, MemberAddress, member_name
from rlmesh.runtime.axes import Axes
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.network import NetworkOptions
from rlmesh.runtime.runtime import Runtime, default_runtime_or_none, set_default_runtime
from rlmesh.runtime.security import make_key
from rlmesh.testing.faults import FaultPlan, faulty
from rlmesh.testing.loopback import LoopbackNetwork

TransportName = Literal["loop", "unix", "ipc", "tcp"]

_TAKEN_S = 5.0
"""So long may a runtime's thread take to do what it was given."""


class InProcessCluster:
    """Objects that are served as members of roles, and a runtime, ``caller``, that calls them.

    With ``with``, each runtime has a loop on a thread of its own. With ``async with``, all of them run on the running
    loop; it may be a `VirtualLoop` if the served methods are ``async def``. Within the block, ``RoleGroup("ACTOR")``
    finds the cluster's members.

    Args:
        transport: what messages pass: ``loop`` (no sockets), ``unix`` (Unix sockets), ``ipc`` (ZeroMQ over Unix
            sockets) or ``tcp`` (ZeroMQ over TCP, on loopback).
        plan: faults that messages meet.
        network: limits of the runtimes.
        key: the job's key; None makes one.
    """

    def __init__(
        self, transport: TransportName = "loop", *, plan: FaultPlan | None = None,
        network: NetworkOptions | None = None, key: bytes | None = None,
    ) -> None:  # fmt: skip
        if transport not in get_args(TransportName):
            known = ", ".join(get_args(TransportName))
            raise UsageError(f"InProcessCluster({transport!r}): the transport is one of {known}")
        self.transport = transport
        self.key = make_key() if key is None else key
        self.network = _network(transport, plan, network or NetworkOptions())
        self.runtimes: list[Runtime] = []
        self.addresses: list[MemberAddress] = []
        self.meshes: dict[str, Axes] = {}
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
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rlm-"))
        self.socket_dir = Path(directory)
        self._stack.callback(set_default_runtime, default_runtime_or_none())
        self.caller = self.start("caller", bind=False)
        set_default_runtime(self.caller)

    def close(self) -> None:
        """Close all runtimes: calls that are pending fail."""
        for runtime in self.runtimes:
            runtime.close()
        self._stack.close()

    def start(self, name: str, *, bind: bool = True) -> Runtime:
        """One more runtime of the cluster, which serves nothing yet."""
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
        of_rank = [name for name, size in (groups or {"": len(objects)}).items() for _ in range(size)]
        if axes is not None:
            self.meshes[role] = Axes.of(dict(axes))
        for rank, obj in enumerate(objects):
            runtime = self.start(member_name(role, rank))
            runtime.serve(member_name(role, rank), obj)
            self.addresses.append(MemberAddress(role, rank, 0, runtime.endpoint, group=of_rank[rank]))
        self.publish()
        return RoleGroup(role, runtime=self.caller)

    def kill(self, role: str, rank: int) -> None:
        """End a member without a word, as SIGKILL would; the others are told how it ended, as their agent would."""
        name = member_name(role, rank)
        for runtime in self.runtimes:
            if runtime.name == name:
                break
        else:
            raise RoleNotFound(f"the cluster serves no {name}")
        self.runtimes.remove(runtime)
        runtime.close()
        how = ExitInfo(role, rank, 0, 0, None, signal.SIGKILL, time.time(), hostname="in-process")
        for other in self.runtimes:
            other.member_lost(how)
        self._settle()

    def publish(self, *more: MemberAddress) -> None:
        """Hand out the address book, with these members besides."""
        self.addresses += more
        self._version += 1
        book = AddressBook(self._version, tuple(self.addresses), tuple(self.meshes.items()))
        for runtime in self.runtimes:
            runtime.set_address_book(book)
        self._settle()

    def _settle(self) -> None:
        """Wait until what the runtimes were told has arrived."""
        if self._embedded:
            return
        for runtime in self.runtimes:
            arrived = threading.Event()
            runtime.post(arrived.set)
            if not arrived.wait(_TAKEN_S):
                raise RuntimeError(f"the loop of {runtime.name} did not turn within {_TAKEN_S:g} s")


def _network(transport: TransportName, plan: FaultPlan | None, options: NetworkOptions) -> NetworkOptions:
    transports = {**LoopbackNetwork().transports, **options.transports}
    if plan is not None:
        real = {"unix": networks.unix, "ipc": networks.zeromq, "tcp": networks.zeromq, **transports}
        transports[transport] = faulty(real[transport], plan)
    return replace(options, transports=transports)
