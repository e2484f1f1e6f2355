"""The agent's processes: started, watched, ended, with their orphans."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.process import Ended, become_member, collect, memory_input, start_process
from rlmesh.agent.processes.process_table import Child, ProcessTable
from rlmesh.errors import LaunchError
from tests.agent.processes import wait_gone
from tests.own_time import HANG_S, OwnTime

DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        {then}
    print(pid, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def noticed() -> list[float]:
    """When the table told of the exits of its children."""
    return []


@pytest_asyncio.fixture
async def table(noticed: list[float]) -> AsyncIterator[ProcessTable]:
    ownership.prctl(ownership.PR_SET_CHILD_SUBREAPER, 1)
    table = ProcessTable(lambda child, how: noticed.append(time.monotonic()))
    yield table
    for child in table:
        await table.kill(child)
    table.close()
    ownership.prctl(ownership.PR_SET_CHILD_SUBREAPER, 0)


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


async def ended(child: Child) -> Ended:
    return await asyncio.wait_for(asyncio.shield(child.ended), 5)


async def test_exit_code_signal_and_memory_are_told(table: ProcessTable) -> None:
    three = await ended(table.start("A:0", python("x = bytearray(50 << 20); raise SystemExit(3)"), os.environ))
    assert (three.exit_code, three.signal) == (3, None)
    assert three.peak_rss_bytes > 50 << 20
    assert three.describe() == "exited with code 3"
    sleeper = table.start("A:1", ["/bin/sleep", "100"], os.environ)
    table.signal(sleeper, signal.SIGKILL)
    killed = await ended(sleeper)
    assert (killed.exit_code, killed.signal, killed.describe()) == (None, 9, "killed by SIGKILL")
    assert sleeper not in table
    assert not table.signal(sleeper, signal.SIGKILL)


async def test_death_is_noticed_within_50_ms(table: ProcessTable, noticed: list[float]) -> None:
    children = [table.start(f"A:{n}", ["/bin/sleep", "100"], os.environ) for n in range(5)]
    after_s = []
    for child in children:
        killed = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        await ended(child)
        after_s.append(noticed.pop() - killed)
    assert statistics.median(after_s) < 0.05, "the machine may have been busy once"


async def test_stop_asks_first_and_kills_after_the_grace(table: ProcessTable, own_time: OwnTime) -> None:
    up, tell = os.pipe()
    stubborn = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write(9, b'x'); time.sleep(99)"
    polite = table.start("A:0", ["/bin/sleep", "100"], os.environ)
    rude = table.start("A:1", python(stubborn), os.environ, inherit={9: tell})
    await asyncio.to_thread(os.read, up, 1)
    os.close(up)
    os.close(tell)
    assert (await table.stop(polite, 5.0)).signal == signal.SIGTERM
    began = time.monotonic()
    assert (await table.stop(rude, 0.1)).signal == signal.SIGKILL
    assert time.monotonic() - began >= 0.1 and own_time.since(began) < 1.0


@pytest.mark.parametrize(
    "then",
    [
        "os.execvp('sleep', ['sleep', '1000'])",
        "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)",
    ],
)
async def test_what_a_dead_child_left_behind_is_ended_and_named(
    table: ProcessTable, tmp_path: Path, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    bystander = table.start("B:0", ["/bin/sleep", "100"], os.environ)
    await ended(table.start("A:0", python(DAEMON.replace("{then}", then)), os.environ, log_path=str(log)))
    daemon = int(log.read_text())
    with caplog.at_level(logging.WARNING):
        found = await table.end_orphans("A:0")
    assert [process.pid for process in found] == [daemon]
    assert wait_gone([daemon], 0) == []
    assert f"A:0 left pid {daemon} (" in caplog.text
    assert bystander in table
    assert await table.end_orphans("A:0") == {}


@pytest.fixture
def started_by_a_library() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """A process that runs, as multiprocessing's resource tracker does, and one that has failed."""
    with subprocess.Popen(["/bin/sleep", "100"]) as running, subprocess.Popen(["/bin/false"]) as failed:
        os.waitid(os.P_PID, failed.pid, os.WEXITED | os.WNOWAIT)
        yield running, failed
        running.kill()


async def test_a_process_that_a_library_started_is_no_orphan(
    table: ProcessTable, started_by_a_library: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]
) -> None:
    running, failed = started_by_a_library
    assert await table.end_orphans("A:0") == {}
    assert running.poll() is None
    assert failed.poll() == 1, "its exit code belongs to the library"


async def test_an_expected_fork_is_no_orphan(table: ProcessTable, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with table.fork_in_flight():
        then = "os.execvp('sleep', ['sleep', '1000'])"
        middle = table.start("zygote", python(DAEMON.replace("{then}", then)), os.environ, log_path=str(log))
        sweep = asyncio.create_task(table.end_orphans("A:0"))
        await ended(middle)
        child = table.adopt("A:1", int(log.read_text()))
    assert await sweep == {}
    assert child in table


def test_input_and_descriptors_arrive_and_nothing_else(tmp_path: Path) -> None:
    big = b"x" * 300_000
    fd = memory_input(big)
    read, write = os.pipe()
    code = "import os, sys; os.write(9, b'%d' % len(sys.stdin.buffer.read())); print(os.getsid(0) == os.getpid())"
    pid = start_process(python(code), os.environ, log_path=str(tmp_path / "log"), inherit={0: fd, 9: write})
    os.close(fd)
    os.close(write)
    assert os.read(read, 100) == b"300000"
    os.close(read)
    assert wait_gone([pid], HANG_S) == []
    how = collect(pid)
    assert how is not None and how.exit_code == 0
    assert (tmp_path / "log").read_text() == "True\n"
    with pytest.raises(ChildProcessError):
        collect(pid)


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match="/no/such/program"):
        start_process(["/no/such/program"], os.environ)


def test_a_member_ends_with_the_thread_of_its_agent() -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from rlmesh.agent.processes.process import become_member\n"
        "parent = os.getpid()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = become_member(parent, 'ACTOR:0')\n"
        "    comm = open('/proc/self/comm').read().strip()\n"
        "    print(os.getpid(), ok, comm, become_member(1, 'x'), flush=True)\n"
        "    import time; time.sleep(100)\n"
        "os.read(0, 1)\n"
    )
    root = str(Path(ownership.__file__).parents[2])
    agent = subprocess.Popen(
        [sys.executable, "-c", code, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    pid, *rest = agent.stdout.readline().split()
    assert rest == ["True", "ACTOR:0", "False"]
    agent.kill()
    agent.communicate(timeout=HANG_S)
    assert wait_gone([int(pid)], HANG_S) == []
    assert become_member.__doc__


def test_a_reused_number_is_never_hit() -> None:
    process = subprocess.Popen(["sleep", "100"])
    found = ownership.read_process(process.pid)
    assert found is not None
    other = ownership.Process(found.pid, found.parent, found.session, found.start - 1, found.name, True)
    assert not ownership.send_signal(other, signal.SIGKILL)
    assert process.poll() is None
    assert ownership.send_signal(found, signal.SIGKILL)
    process.wait(HANG_S)
    assert not ownership.send_signal(found, signal.SIGKILL)


HIDDEN = """
import ctypes, os, subprocess, sys
from rlmesh.agent.processes import ownership

libc = ctypes.CDLL(None)
NEWNS, PRIVATE = 0x20000, 1 << 18 | 1 << 14
if libc.unshare(NEWNS) or libc.mount(b"none", b"/", None, PRIVATE, None):
    sys.exit(77)
if libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=1"):
    sys.exit(77)
os.setgroups([]), os.setgid(65534), os.setuid(65534)
if os.access("/proc/1/status", os.R_OK):  # this kernel hides nothing
    sys.exit(77)
child = subprocess.Popen(["sh", "-c", "echo; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()  # a new program is hidden for a moment, even from its own user
print([process.pid == child.pid for process in ownership.descendants(os.getpid())], ownership.handles(1, 15))
child.communicate()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_own_processes_are_found_where_those_of_others_are_hidden() -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=HANG_S)
    if done.returncode == 77:
        pytest.skip("this machine mounts no /proc that hides processes")
    assert (done.stdout, done.stderr) == ("[True] False\n", "")
