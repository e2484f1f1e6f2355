"""What the master answers: to agents that another one has replaced, and not before it has saved what it confirms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlmesh.agent.protocol import MASTER, AgentConfig, MemberProcess
from rlmesh.master.jobspec import JobSpec
from rlmesh.master.prime_master import PrimeMaster
from rlmesh.master.state.persistence import Persistence
from rlmesh.master.state.store import STORE_FILE
from rlmesh.placement.machine.inventory import NodeInfo
from rlmesh.runtime.connections.security import make_key
from rlmesh.runtime.runtime import Runtime
from tests.master.bench import job, node, role
from tests.own_time import HANG_S

LEASE_S = 15.0


@asynccontextmanager
async def open_master(folder: Path) -> AsyncIterator[PrimeMaster]:
    """A master of a job of two nodes that handles nothing before it is in ``serving``."""
    spec: JobSpec = replace(job(role("TRAINER"), nnodes=2), run_dir=str(folder))
    config = AgentConfig(
        job_id=spec.job_id, job_name=spec.job_name, key_hex="00" * 32, node_rank=0, node_name="n0", nnodes=2,
        socket_dir=str(folder), run_dir=str(folder), master_endpoint="ipc:///tmp/s/master",
        start_master=True, job_path="", virtual_devices=1, lease_s=LEASE_S,
    )  # fmt: skip
    persistence = Persistence(folder / STORE_FILE, spec.job_id)
    stored = await persistence.load()
    async with Runtime.open(name=MASTER, key=make_key(), bind=False) as runtime:
        master = PrimeMaster(config, spec, runtime, persistence, stored)
        yield master


@asynccontextmanager
async def serving(master: PrimeMaster) -> AsyncIterator[None]:
    task = asyncio.create_task(master.serve())
    yield
    await master.goodbye()
    await asyncio.wait_for(task, HANG_S)


RUNNING = (MemberProcess("TRAINER", 0, 0, 17),)
FIRST = replace(node(0), machine="a third")
OLD = replace(node(1), machine="another")
NEW = replace(OLD, agent_endpoint="tcp://127.0.0.1:7")


async def asks(master: PrimeMaster, info: NodeInfo, sender: str, *running: MemberProcess) -> float:
    """The lease that an agent gets when it registers."""
    return (await master.register_agent(info, sender, running)).lease_s


async def until_lost(master: PrimeMaster) -> None:
    deadline = time.monotonic() + HANG_S
    while 1 not in master.manager.context.lost_nodes:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_agent_in_whose_place_another_one_registered_runs_nothing_any_more(tmp_path: Path) -> None:
    """Its node stood still until another machine had its rank, and goes on now with its members."""
    async with open_master(tmp_path) as master, serving(master):
        assert await asks(master, FIRST, "first") == LEASE_S
        assert await asks(master, OLD, "old") == LEASE_S
        assert await asks(master, OLD, "old", *RUNNING) == LEASE_S, "after a lost connection"
        assert (await master.renew(1, "old")).lease_s == LEASE_S
        await master.agent_ended(1, "gave no sign of life", True)
        await until_lost(master)
        assert await asks(master, NEW, "new") == LEASE_S
        assert (await master.renew(1, "old")).lease_s == 0.0
        for running in (RUNNING, (), ()):
            assert await asks(master, OLD, "old", *running) == 0.0
        assert master.manager.context.nodes[1] == NEW and not master.manager.context.lost_nodes
        assert (await master.renew(1, "new")).lease_s == LEASE_S


async def test_an_agent_waits_until_the_one_in_whose_place_it_comes_runs_nothing(tmp_path: Path) -> None:
    """The launch of a node was killed and is started again, while its first guardian and agent are late to end."""
    async with open_master(tmp_path) as master, serving(master):
        assert await asks(master, FIRST, "first") == LEASE_S
        assert await asks(master, OLD, "old", *RUNNING) == LEASE_S
        await master.agent_ended(1, "its launch is gone", False)
        for _ in range(2):
            assert await asks(master, NEW, "new") == 0.0
        for sender in ("new", "old"):
            assert (await master.renew(1, sender)).lease_s == 0.0
        assert await asks(master, OLD, "old") == 0.0, "it does not know yet that it has no lease"
        assert not master.manager.context.lost_nodes
        assert await asks(master, OLD, "old", *RUNNING) == 0.0
        assert await asks(master, NEW, "new") == 0.0
        assert await asks(master, OLD, "old") == 0.0
        await until_lost(master)
        assert await asks(master, NEW, "new") == LEASE_S
        assert master.manager.context.nodes[1] == NEW


@pytest.mark.parametrize("what", ["stop", "notice", "device_failed", "agent_ended"])
async def test_what_a_master_has_confirmed_its_successor_knows(tmp_path: Path, what: str) -> None:
    """Whoever gets the answer does not ask again."""
    async with open_master(tmp_path) as master:
        called = asyncio.ensure_future(
            {
                "stop": lambda: master.stop("it must end", 1.0),
                "notice": lambda: master.notice("it must end", 60.0, 1.0),
                "device_failed": lambda: master.device_failed(0, "v0", "it fell off the bus"),
                "agent_ended": lambda: master.agent_ended(0, "its machine is off", True),
            }[what]()
        )
        await asyncio.wait([called], timeout=0.05)
        assert not called.done()
        async with serving(master):
            await asyncio.wait_for(called, HANG_S)
