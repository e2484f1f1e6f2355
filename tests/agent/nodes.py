"""A node under test: a real guardian and agent, with a master that writes down what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from rlmesh.agent.monitoring.logs import member_log
from rlmesh.agent.node_start import GuardianProcess
from rlmesh.agent.protocol import (
    AGENT,
    CONTROL,
    MASTER,
    AgentConfig,
    ExitReport,
    Grant,
    MemberHello,
    MemberProcess,
    WorkerSpec,
)  # fmt: skip
from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.job.status import ExitInfo, MetricRecord
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S

ROOT = str(Path(__file__).parents[2])
ROLES = "tests.agent.roles"

Said = tuple[Any, ...]


class Master:
    """Takes what agents and workers say, and hands it to whoever waits for it."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.senders: dict[str, str] = {}
        self._changed = asyncio.Condition()

    async def _note(self, *what: Any) -> None:
        async with self._changed:
            self.said.append(what)
            self._changed.notify_all()

    async def heard(self, *what: Any, wait_s: float = HANG_S) -> Said:
        """The first message that begins so; waits for it."""

        def find() -> Said | None:
            return next((said for said in self.said if said[: len(what)] == what), None)

        async def wait() -> Said:
            async with self._changed:
                while (found := find()) is None:
                    await self._changed.wait()
                return found

        try:
            return await asyncio.wait_for(wait(), wait_s)
        except TimeoutError:
            raise AssertionError(f"{what} was not said within {wait_s} s, but {self.said}") from None

    @rpc
    async def register_agent(self, node: NodeInfo, sender: str, running: tuple[MemberProcess, ...]) -> Grant:
        self.senders[f"agent:{node.node_rank}"] = sender
        await self._note("agent", node, running)
        return Grant()

    @rpc(concurrent=8)
    async def attend(self, sender: str, wait_s: float) -> bool:
        await asyncio.sleep(wait_s)
        return False

    @rpc
    async def deliver(self, sender: str, first: int, items: tuple[MetricRecord | ExitInfo, ...]) -> int:
        for item in items:
            name = f"{item.role}:{item.rank}"
            if isinstance(item, MetricRecord):
                await self._note("report", name, item)
            else:
                await self._note("exited", name, item, time.monotonic())
        return first + len(items) - 1

    @rpc
    async def register_member(self, hello: MemberHello) -> None:
        await self._note("bound", f"{hello.role}:{hello.rank}", hello)

    @rpc
    async def member_ready(self, role: str, rank: int, incarnation: int, restored: int | None = None) -> None:
        await self._note("ready", f"{role}:{rank}")

    @rpc
    async def member_failed(
        self, role: str, rank: int, incarnation: int, exc: Exception, tb: str, origin: object
    ) -> None:
        await self._note("failed", f"{role}:{rank}", exc, tb)

    @rpc
    async def run_finished(self, role: str, rank: int, incarnation: int) -> None:
        await self._note("finished", f"{role}:{rank}")


class Node:
    """One node; members get their address books as from a real master."""

    def __init__(self, config: AgentConfig, runtime: Runtime, master: Master) -> None:
        self.config = config
        self.master = master
        self.runtime = runtime
        self.guardian = GuardianProcess(config)
        self.info: NodeInfo = NodeInfo(0, "", "", "", 0, 0, 0)
        self.report: ExitReport | None = None
        self.specs: dict[str, WorkerSpec] = {}

    @property
    def agent(self) -> MemberHandle:
        return self.runtime.peer(AGENT, self.info.agent_endpoint).options(timeout_s=HANG_S)

    def spec(self, entry: str | EntryPoint, name: str = "ACTOR:0", **changes: Any) -> WorkerSpec:
        role, _, rank = name.partition(":")
        if isinstance(entry, str):
            entry = EntryPoint("class" if entry[:1].isupper() else "function", ROLES, entry)
        config = self.config
        spec = WorkerSpec(
            job_id=config.job_id,
            job_name=config.job_name,
            key_hex=config.key_hex,
            role=role,
            rank=int(rank),
            world_size=4,
            incarnation=0,
            local_rank=int(rank),
            local_world_size=4,
            node_rank=0,
            node_name=config.node_name,
            entry=entry,
            master_endpoint=config.master_endpoint,
            socket_dir=config.socket_dir,
            run_dir=config.run_dir,
            log_path=str(member_log(config.run_dir, role, int(rank))),
            backend="simple",
            user_config=cloudpickle.dumps({"lr": 0.1}),
            import_roots=(ROOT,),
            grace_s=2.0,
        )
        return replace(spec, **changes)

    async def spawn(self, *specs: WorkerSpec) -> tuple[int, ...]:
        """Start members, wait until they are bound, and send them their book."""
        pids: tuple[int, ...] = await self.agent.call("spawn", specs)
        for spec in specs:
            self.specs[f"{spec.role}:{spec.rank}"] = spec
        return pids

    async def bound(self, name: str) -> MemberHello:
        """Wait until a member is bound and give it a book."""
        _, _, hello = await self.master.heard("bound", name)
        address = MemberAddress(hello.role, hello.rank, hello.incarnation, hello.endpoint, 0, hello.pid)
        self.control(hello).notify("update_book", AddressBook(1, (address,)))  # it may have failed and ended by now
        found: MemberHello = hello
        return found

    async def start(self, entry: str | EntryPoint, name: str = "ACTOR:0", **changes: Any) -> MemberHandle:
        """A member that is ready."""
        await self.spawn(self.spec(entry, name, **changes))
        hello = await self.bound(name)
        await self.master.heard("ready", name)
        return self.member(hello)

    def member(self, hello: MemberHello) -> MemberHandle:
        name = f"{hello.role}:{hello.rank}"
        return self.runtime.peer(name, hello.endpoint).options(timeout_s=HANG_S)

    def control(self, hello: MemberHello | MemberHandle) -> MemberHandle:
        assert hello.endpoint is not None
        return self.runtime.peer(CONTROL, hello.endpoint).options(timeout_s=HANG_S)

    async def exited(self, name: str = "ACTOR:0") -> ExitInfo:
        exit: ExitInfo = (await self.master.heard("exited", name))[2]
        return exit

    def log(self, name: str = "ACTOR:0") -> str:
        role, _, rank = name.partition(":")
        return member_log(self.config.run_dir, role, int(rank)).read_text()

    def notes(self, name: str = "ACTOR:0") -> list[str]:
        path = Path(self.config.run_dir) / f"{name}.notes"
        return path.read_text().splitlines() if path.exists() else []

    def agent_log(self) -> str:
        return self.guardian.agent_log.read_text()

    async def end(self) -> ExitReport:
        """Let go of the guardian and wait for its report."""
        if self.report is None:
            self.guardian.let_go()
            self.report = await asyncio.to_thread(self.guardian.wait, 10.0)
        return self.report


def is_there(path: str) -> bool:
    return os.path.lexists(path)


@asynccontextmanager
async def open_node(tmp_path: Path, *, env: Mapping[str, str] | None = None, **changes: Any) -> AsyncIterator[Node]:
    """A node that is registered. At the end nothing may be left of it."""
    sockets = tempfile.mkdtemp(prefix="rlm-", dir=os.environ["XDG_RUNTIME_DIR"])
    here = tempfile.mkdtemp(prefix="rlm-", dir=os.environ["XDG_RUNTIME_DIR"])
    config = AgentConfig(
        job_id=f"test-{secrets.token_hex(4)}",
        job_name="test",
        key_hex=secrets.token_hex(32),
        node_rank=0,
        node_name="node0",
        nnodes=1,
        socket_dir=sockets,
        run_dir=str(tmp_path / "run"),
        master_endpoint=f"ipc://{here}/master",
        start_master=False,
        virtual_devices=2,
        env=dict(env or {}),
    )
    config = replace(config, **changes)
    key = bytes.fromhex(config.key_hex)
    master = Master()
    async with Runtime.open(name=MASTER, key=key, bind=config.master_endpoint, job_id=config.job_id) as runtime:
        runtime.serve(MASTER, master, inline=True)
        node = Node(config, runtime, master)
        try:
            node.info = (await master.heard("agent"))[1]
            yield node
        except BaseException:
            print(f"--- agent's log ---\n{node.agent_log() if node.guardian.agent_log.exists() else ''}")
            raise
        finally:
            report = await node.end()
            assert report.clean, report
            assert not is_there(sockets)
    shutil.rmtree(here)
    assert json.loads((tmp_path / "run" / "exit-node0.json").read_text())["node_rank"] == 0
