"""Only one process has the claim on a member's start; a zygote that dies at the worst moment starts nobody twice."""

from __future__ import annotations

import os
import pickle
import sys
import textwrap
from pathlib import Path

import pytest

from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.start_claim import make_claim, remove_claim
from rlmesh.agent.protocol import WorkerSpec
from rlmesh.agent.worker.worker import forked_main
from rlmesh.job.entry_points.entry import EntryPoint
from tests.agent.nodes import open_node

DIES_AFTER_ITS_FORK = """
import glob, os, signal, sys, time
if "rlmesh.agent.processes.zygote" in sys.orig_argv:
    real, zygote, began = os.waitpid, os.getpid(), time.monotonic()
    def waitpid(pid, options):  # of the intermediate process: the worker is forked, and the agent does not know it yet
        ended = real(pid, options)
        while os.getpid() == zygote and {wait} and time.monotonic() < began + 30:
            time.sleep(0.001)
        if os.getpid() == zygote:
            os.kill(zygote, signal.SIGKILL)
        return ended
    os.waitpid = waitpid
    real_symlink = os.symlink
    def symlink(target, path):
        while os.getppid() != int(sys.orig_argv[-2]) or {slow} and not os.path.lexists(path):
            time.sleep(0.001)
        real_symlink(target, path)
    os.symlink = symlink
"""
"""A ``sitecustomize`` for the zygote alone. ``{wait}`` holds its death back until the fork has made its claim;
``{slow}`` holds the fork back until the agent has made one."""


def test_the_first_claim_counts_for_all(tmp_path: Path) -> None:
    claim = str(tmp_path / "claim")
    read, write = os.pipe()
    children = []
    for _ in range(8):
        if (child := os.fork()) == 0:
            os.write(write, b"%d\n" % make_claim(claim))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    said = os.read(read, 4096).split()
    for fd in (read, write):
        os.close(fd)
    assert len(said) == 8 and len(set(said)) == 1 and int(said[0]) in children
    assert make_claim(claim) == int(said[0])
    remove_claim(claim)
    remove_claim(claim)
    assert make_claim(claim) == os.getpid()
    with pytest.raises(FileNotFoundError):
        make_claim(str(tmp_path / "no" / "claim"))


@pytest.mark.parametrize("first", ["fork", "agent"])
async def test_a_zygote_that_dies_between_fork_and_answer_starts_nobody_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    claimed = f"not glob.glob({str(Path(os.environ['XDG_RUNTIME_DIR']) / 'rlm-*' / 'start-*')!r})"
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        textwrap.dedent(DIES_AFTER_ITS_FORK).format(wait=claimed if first == "fork" else False, slow=first == "agent")
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    async with open_node(tmp_path) as node:
        (pid,) = await node.spawn(node.spec("Echo", "A:0"))
        hello = await node.bound("A:0")
        await node.master.heard("ready", "A:0")
        assert await node.member(hello).call("echo", 1) == 1
        assert hello.pid == pid
        bound = [said[2].pid for said in node.master.said if said[:2] == ("bound", "A:0")]
        mark = f"{node.config.job_id}/0"
        running = [process.pid for process in ownership.marked(mark) if process.name == "A:0"]
        assert (bound, running) == ([pid], [pid])
        log = node.agent_log()
        assert ("A:0 was forked by the bare zygote" in log) == (first == "fork")
        assert (f"A:0.0 is pid {pid} (exec," in log) == (first == "agent")
        os.kill(pid, 9)
        assert (await node.exited("A:0")).signal == 9


@pytest.mark.parametrize("cause", ["too late", "no folder"])
def test_a_fork_that_cannot_have_the_claim_does_not_begin(tmp_path: Path, cause: str) -> None:
    claim = tmp_path / ("claim" if cause == "too late" else "no/claim")
    if cause == "too late":
        make_claim(str(claim))
    log = tmp_path / "log"
    spec = WorkerSpec(
        "id", "job", "", "A", 0, 1, 0, 0, 1, 0, "", EntryPoint("class", "none", "None"), "", str(tmp_path),
        str(tmp_path), str(log), "simple", claim=str(claim),
    )  # fmt: skip
    if (pid := os.fork()) == 0:
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os._exit(forked_main(pickle.dumps(spec), os.getppid()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert ("forked too late" if cause == "too late" else "No such file or directory") in log.read_text()
