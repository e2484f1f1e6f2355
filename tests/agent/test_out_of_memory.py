"""An agent or a master without memory ends at once, and does not leave its job waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlmesh.agent.master_session import AgentCallbacks, Freezer, MasterSession
from rlmesh.agent.protocol import OUT_OF_MEMORY, AgentConfig
from rlmesh.runtime.runtime import Runtime

PROGRAM = """
import asyncio, errno, logging, sys
import uvloop
from rlmesh.agent.monitoring.out_of_memory import end_tasks_without_memory
from rlmesh.agent.monitoring.own_logs import log_to_standard_error

log_to_standard_error()
kept = []

async def fails(error):
    raise error

def logs(error):
    try:
        raise error
    except BaseException:
        logging.getLogger("rlmesh.any").exception("failed")

def callback(error):
    raise error

async def main():
    end_tasks_without_memory(asyncio.get_running_loop())
    {what}
    await asyncio.sleep(0.05)
    for task in kept:
        await asyncio.gather(task, return_exceptions=True)

uvloop.run(main())
"""
WAYS = {
    "a task that nobody awaits": "kept.append(asyncio.get_running_loop().create_task(fails({error})))",
    "an error that is logged": "logs({error})",
    "a callback": "asyncio.get_running_loop().call_soon(callback, {error})",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("error", "code"),
    [("MemoryError()", OUT_OF_MEMORY), ("OSError(errno.ENOMEM, 'fork')", OUT_OF_MEMORY), ("OSError(2, 'x')", 0)],
)
def test_only_missing_memory_ends_the_process(way: str, error: str, code: int) -> None:
    program = PROGRAM.format(what=WAYS[way].format(error=error))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code, ended.stderr
    assert ("out of memory" in ended.stderr) == (code != 0)


def test_a_task_that_is_cancelled_before_it_begins_leaves_no_warning() -> None:
    program = PROGRAM.format(
        what="task = asyncio.get_running_loop().create_task(fails(OSError(2, 'x'))); task.cancel()"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_session_that_fails_ends_the_node_and_says_why() -> None:
    """The task that registers the node is awaited by nobody."""
    given_up: list[str] = []

    async def fence(grace_s: float) -> None: ...

    class NoMaster:
        def options(self, **_: Any) -> NoMaster:
            return self

        def call(self, *_: Any) -> Any:
            raise RuntimeError("it cannot even ask")

    callbacks = AgentCallbacks(
        members=list, running=lambda: (), fence=fence, freezer=Freezer(list), give_up=given_up.append,
        over=lambda: None,
    )  # fmt: skip
    runtime = cast(Runtime, SimpleNamespace(peer=lambda *_: NoMaster()))
    config = cast(AgentConfig, SimpleNamespace(master_endpoint="", lease_s=0.0))
    session = MasterSession(config, runtime, "agent", cast(Any, None), callbacks)
    session.start()
    for _ in range(3):  # the task, and then its callback
        await asyncio.sleep(0)
    assert given_up == ["its session with the master failed: RuntimeError: it cannot even ask"]
    await session.close()
