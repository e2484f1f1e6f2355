"""Jobs whose surroundings fail: no memory, no temporary files, shells that leave processes, a member without luck."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmesh.master import events as ev
from tests.master.bench import Bench, job, role
from tests.own_time import HANG_S, OwnTime

SCRIPT = Path(__file__).with_name("sturdy_job.py")
ROOT = Path(__file__).parents[2]


def run(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    temporary = folder / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    env.pop("XDG_RUNTIME_DIR", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind], cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert not list(temporary.glob("rlm-*")), "the folder of the sockets is removed, also one that was made again"
    return done


@pytest.mark.case("a13")
def test_members_without_memory_do_not_keep_a_job_from_its_end(tmp_path: Path, own_time: OwnTime) -> None:
    began = time.monotonic()
    done = run("memory", tmp_path)
    assert "the members said" in done.stdout and "MemoryError" in done.stdout, done.stdout + done.stderr
    assert "the job has succeeded" in done.stdout, done.stdout + done.stderr
    assert own_time.since(began) < 30.0


@pytest.mark.case("a13")
def test_teardown_of_a_member_that_cannot_take_the_order_is_not_waited_for() -> None:
    bench = Bench(job(role("SERVER", 2), role("TRAINER")))
    bench.running()
    bench.finish("TRAINER:0")
    bench.exit("TRAINER:0")
    assert [action.member for action in bench.took(ev.Teardown)][-2:] == [("SERVER", 0), ("SERVER", 1)]
    bench.send(ev.TeardownUnheard("SERVER", 1, 0, "CallTimeout: no answer"))
    stops = bench.took(ev.StopMembers)
    assert [stop.members for stop in stops] == [(("SERVER", 1),)], "the other one has its time"
    assert "SERVER:1: it cannot run teardown() (CallTimeout: no answer)" in bench.manager.context.note
    bench.send(ev.TeardownUnheard("SERVER", 1, 0, "again"))
    assert len(bench.took(ev.StopMembers)) == 1
    bench.exit("SERVER:1", signal=9)
    bench.exit("SERVER:0")
    assert bench.stage == "succeeded"


@pytest.mark.case("b09")
def test_a_socket_folder_that_a_cleaner_removed_is_made_again(tmp_path: Path) -> None:
    done = run("cleaner", tmp_path)
    assert "the next one was reached" in done.stdout, done.stdout + done.stderr
    assert "the job has succeeded" in done.stdout and done.returncode == 0
    (agent,) = (tmp_path / "runs").glob("*/logs/agent-0.log")
    assert "was removed, perhaps by a cleaner of temporary files, and is restored" in agent.read_text()


@pytest.mark.case("b08")
def test_what_a_members_shells_leave_is_reaped(tmp_path: Path) -> None:
    done = run("shells", tmp_path)
    assert "no zombie is left" in done.stdout and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.case("a10")
@pytest.mark.slow
def test_a_spent_budget_shows_the_first_failure_with_its_traceback(tmp_path: Path) -> None:
    done = run("init", tmp_path)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "UNLUCKY:0 was restarted 2 times within" in said and "the disk is gone" in said
    told = said[said.rindex("failed. First cause:") :]
    assert "in open_the_data" in told, "the traceback of the first failure"
