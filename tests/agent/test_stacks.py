"""Stacks of members: of one that sleeps, one that never lets go of the interpreter's lock, one that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from rlmesh.agent.worker.stacks import dump_stacks, own_stacks
from rlmesh.job.status import MemberStack
from tests.agent.nodes import open_node
from tests.agent.processes import wait_until


async def test_stacks_of_members_that_cannot_answer_are_read_from_outside(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        asked = await node.start("Echo", "ACTOR:0")
        holder = await node.start("Holder", "ACTOR:1")
        stopped = await node.start("Echo", "ACTOR:2")
        pid = (await stopped.call("facts"))["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            held = holder.call("hold_the_lock", 4.0)
            # Its own news of that is kept back by the lock.
            await asyncio.to_thread(wait_until, lambda: "holds the lock" in node.notes("ACTOR:1"))
            keys = tuple(("ACTOR", rank, 0) for rank in range(4))
            found = {stack.name: stack for stack in await node.agent.call("examine", keys, keys[1:])}
            told = await node.control(asked).call("stacks")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert set(found) == {"ACTOR:0", "ACTOR:1", "ACTOR:2"}
        assert found["ACTOR:0"].text == "", "it can answer, so it gets no signal"
        assert "Main thread" in told and "MainThread] (most recent call first):" in told
        assert any("in hold_the_lock" in frame for frame in found["ACTOR:1"].frames)
        assert "its process is stopped" in found["ACTOR:2"].text
        assert found["ACTOR:2"].state == "is stopped" and not found["ACTOR:2"].frames
        await held


@pytest.mark.case("a07")
async def test_to_look_at_a_member_interrupts_nothing(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        holder = await node.start("Holder", "ACTOR:0")
        held = holder.call("hold_in_system_calls", 1.5)
        await asyncio.to_thread(wait_until, lambda: "holds the lock" in node.notes("ACTOR:0"))
        key = ("ACTOR", 0, 0)
        looks = 0
        while not held.done():
            (stack,) = await node.agent.call("examine", (key,), (key,))
            looks += any("in hold_in_system_calls" in frame for frame in stack.frames)
        slept, sleep_s, polled, poll_s = await held
    assert looks > 3
    assert (slept, polled) == (0, 0), "neither returned early"
    assert sleep_s >= 1.5 and poll_s >= 1.49


def test_a_process_tells_what_its_own_threads_do() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="the other")
    thread.start()
    try:
        stacks = own_stacks()
    finally:
        go_on.set()
        thread.join()
    text = stacks()
    assert "[the other] (most recent call first):" in text and "in wait" in text
    frames = MemberStack("ACTOR", 0, 0, 1, "runs", text=text).frames
    assert frames[0].endswith("in own_stacks") and frames[1].endswith(
        f"in {test_a_process_tells_what_its_own_threads_do.__name__}"
    )


def test_a_process_that_does_not_listen_is_not_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert "does not listen" in asyncio.run(dump_stacks(process.pid, tmp_path / "none"))
            assert process.poll() is None
        finally:
            process.kill()
    assert asyncio.run(dump_stacks(process.pid, tmp_path / "none")) == "it has ended"
