"""Stacks of members: of one that sleeps, one that never lets go of the interpreter's lock, one that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

from rlmesh.agent.stacks import dump_stacks
from tests.agent.nodes import open_node


async def test_stacks_of_members(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.start("Echo", "ACTOR:0")
        holder = await node.start("Holder", "ACTOR:1")
        stopped = await node.start("Echo", "ACTOR:2")
        pid = (await stopped.call("facts"))["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            held = holder.call("hold_the_lock", 4.0)
            await asyncio.sleep(0.2)  # until it has begun, whose own news the lock keeps back
            found = await node.agent.call("stacks")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "in hold_the_lock" in found["ACTOR", 1, 0]
        assert "most recent call first" in found["ACTOR", 0, 0]
        assert "it is stopped, or waits in the kernel" in found["ACTOR", 2, 0]
        await held


def test_a_process_that_does_not_listen_is_not_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert "does not listen" in asyncio.run(dump_stacks(process.pid, tmp_path / "none"))
            assert process.poll() is None
        finally:
            process.kill()
    assert asyncio.run(dump_stacks(process.pid, tmp_path / "none")) == "it has ended"
