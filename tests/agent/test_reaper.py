"""A member reaps what it inherits, and nothing that its own code waits for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, multiprocessing, os, subprocess, sys, threading, time
from rlmesh.agent.processes import ownership
from rlmesh.agent.worker.reaper import FEW, LATE_S, SOON_S, Reaper, StartedChildren

ownership.prctl(ownership.PR_SET_CHILD_SUBREAPER, 1)

def zombies():
    return {p.pid for p in ownership.descendants(os.getpid()) if p.parent == os.getpid() and not p.running}

def until(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def fork_and_exit(code):
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    return pid

def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]

before = subprocess.Popen(["sh", "-c", "exit 9"])
until(lambda: before.pid in zombies())
started = StartedChildren()
assert started.watch()
now = [100.0]
reaper = Reaper(started, lambda: now[0])

popen = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in range(1, 6)]
popen += [in_thread(lambda: subprocess.Popen(["sh", "-c", "exit 6"]))]
popen += [subprocess.Popen(["sh", "-c", "exit 7"], preexec_fn=lambda: None)]
popen += [subprocess.Popen(["true"], close_fds=False)]
forked = {fork_and_exit(20): 20, in_thread(lambda: fork_and_exit(21)): 21}
spawned = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 30"], os.environ)
process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(40,))
process.start()
def orphans(count):
    for _ in range(count):
        subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"], check=True)
orphans(40)
own = {before.pid, *(p.pid for p in popen), *forked, spawned, process.pid}
until(lambda: len(zombies()) == len(own) + 40)
reaper.look()
assert len(zombies()) == len(own) + 40, "they may be somebody's yet"
now[0] += SOON_S + 0.1
reaper.look()
assert zombies() == own, (zombies(), own)
for _ in range(5):
    now[0] += LATE_S
    reaper.look()
assert zombies() == own, "whoever started them may wait for them whenever he likes"
assert [before.wait(), *(p.wait() for p in popen)] == [9, 1, 2, 3, 4, 5, 6, 7, 0]
assert {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked} == forked
assert os.waitstatus_to_exitcode(os.waitpid(spawned, 0)[1]) == 30
process.join()
assert process.exitcode == 40

async def by_asyncio():
    found = await asyncio.create_subprocess_exec("sh", "-c", "exit 50")
    return await found.wait()
assert asyncio.run(by_asyncio()) == 50

orphans(FEW)
until(lambda: len(zombies()) == FEW)
reaper.look()
now[0] += SOON_S + 1
reaper.look()
assert len(zombies()) == FEW, "a few may be a library's"
now[0] += LATE_S
reaper.look()
assert not zombies() and not started.pids
print("right")
"""


@pytest.mark.case("b08")
def test_orphans_are_reaped_and_children_are_not() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
