"""A control group for each member, where this machine lets us make some."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlmesh.agent.processes import control_groups
from rlmesh.agent.processes.cleanup import MemberGroups
from rlmesh.agent.protocol import WorkerSpec
from rlmesh.job.entry_points.entry import EntryPoint
from tests.agent.nodes import Node, open_node
from tests.agent.processes import wait_gone, wait_until
from tests.own_time import HANG_S

OWN, WHY_NOT = control_groups.own_group()
real = pytest.mark.skipif(not OWN, reason=f"control groups cannot be made here: {WHY_NOT}")


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        yield node


def group_of(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line[3:] for line in lines if line.startswith("0::"))


def folder(node: Node) -> Path:
    return Path(control_groups.node_group(OWN, node.config.job_id, 0))


@real
async def test_a_member_and_what_it_starts_live_in_its_group(node: Node) -> None:
    member = await node.start("Echo")
    pid, daemon = (await member.call("facts"))["pid"], await member.call("daemon")
    own = f"/rlmesh-{node.config.job_id}-n0/ACTOR-0.0"
    assert group_of(pid).endswith(own) and group_of(daemon).endswith(own)
    assert not group_of(node.info.agent_pid).endswith(own)
    os.kill(pid, signal.SIGKILL)
    await node.exited()
    assert wait_gone([daemon], HANG_S) == []
    await asyncio.to_thread(wait_until, lambda: list(folder(node).glob("ACTOR-*")) == [])
    assert (await node.end()).clean and not folder(node).exists()


@real
async def test_what_forks_faster_than_one_can_look_is_ended(node: Node) -> None:
    """Each process of it lives for a millisecond, in a session of its own, and takes no SIGTERM."""
    member = await node.start("Echo")
    await member.call("flee")
    running = control_groups.members_of(str(folder(node)))
    assert len(running) > 1
    os.kill((await member.call("facts"))["pid"], signal.SIGKILL)
    await node.exited()
    await asyncio.to_thread(wait_until, lambda: list(folder(node).glob("ACTOR-*")) == [])
    assert control_groups.members_of(str(folder(node))) == []
    assert (await node.end()).clean and not folder(node).exists()


@real
async def test_the_guardian_ends_the_groups_of_an_agent_that_was_killed(node: Node) -> None:
    member = await node.start("Echo")
    await member.call("flee")
    os.kill(node.info.agent_pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not folder(node).exists())


@real
async def test_no_groups_if_they_are_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(control_groups.OFF, "0")
    async with open_node(tmp_path) as node:
        member = await node.start("Echo")
        pid, daemon = (await member.call("facts"))["pid"], await member.call("daemon")
        assert group_of(pid) == group_of(node.info.agent_pid)
        os.kill(pid, signal.SIGKILL)
        await node.exited()
        assert wait_gone([daemon], HANG_S) == [], "it is found by its descent"
        assert not folder(node).exists()


@real
def test_groups_that_a_job_has_left_are_swept() -> None:
    own = Path(OWN) / f"test-of-sweeping-{os.getpid()}"
    left, others = own / "rlmesh-j-n0", own / "another"
    (left / "ACTOR-0.0").mkdir(parents=True)
    others.mkdir()
    try:
        control_groups.sweep(str(own), lambda mark: mark == "j/0")
        assert left.exists(), "its node lives, and may be about to start a member"
        control_groups.sweep(str(own), lambda mark: False)
        assert not left.exists() and others.exists()
    finally:
        assert control_groups.end(str(own))


def test_why_groups_cannot_be_made(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("7:memory:/job\n")
    assert control_groups.own_group(str(proc), (str(root),)) == ("", "there is no control group v2")
    (proc / "self/cgroup").write_text("7:memory:/job\n0::/user/job\n")
    assert control_groups.own_group(str(proc), (str(root),)) == ("", "the control groups v2 are not mounted")
    own = root / "user/job"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    assert control_groups.own_group(str(proc), (str(root),)) == ("", f"{own} is not delegated to this user")
    (own / "cgroup.procs").write_text("")
    assert control_groups.own_group(str(proc), (str(tmp_path / "no"), str(root))) == (str(own), "")


def member(**changes: Any) -> WorkerSpec:
    entry = EntryPoint("class", "tests.agent.roles", "Echo")
    spec = WorkerSpec("j", "j", "", "ACTOR", 0, 1, 0, 0, 1, 0, "n", entry, "", "", "", "", "simple")
    return replace(spec, **changes)


def test_the_memory_that_was_asked_for_is_the_limit(tmp_path: Path) -> None:
    """On a tree of ordinary files: what the kernel makes of it is its own."""
    spec = member(memory_limit_bytes=1 << 30)
    groups = MemberGroups("j", 0, str(tmp_path))
    made = Path(groups.make(spec))
    assert made == tmp_path / "rlmesh-j-n0/ACTOR-0.0"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    assert (made.parent / "cgroup.subtree_control").read_text() == "+memory"
    assert (made / "memory.max").read_text() == str(1 << 30)
    assert (made / "memory.oom.group").read_text() == "1"
    free = Path(groups.make(member(rank=1)))
    assert free.is_dir() and not (free / "memory.max").exists()
