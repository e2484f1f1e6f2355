"""A master that is killed: its agent starts it again, and the job does not notice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.master.launched import Launched, alive, launch
from tests.own_time import OwnTime


def kill_master(job: Launched) -> int:
    pid = job.pid_of("prime_master")
    os.kill(pid, signal.SIGKILL)
    return pid


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_master_killed_twice_while_members_work(tmp_path: Path, own_time: OwnTime) -> None:
    with launch(tmp_path, "--steps", "150", "--pace", "0.02") as job:
        job.wait_for("step 3")
        members = {int(pid) for pid in (job.wait_for(rf"pid of {who} is (\d+)")[1] for who in ("ADDER:0", "TRAINER"))}
        for number in (2, 3):
            began = time.monotonic()
            killed = kill_master(job)
            job.wait_for(rf"the master \(pid {killed}\) died")
            job.wait_for(f"master {number} of this job")
            assert own_time.since(began) < 4.0  # 0.4 s on a quiet machine
            assert all(map(alive, members))
        below = job.pids()
        assert job.ended() == 0, job.output
    run = run_of(tmp_path)
    assert steps_of(run) == list(range(150))
    assert json.loads((run / "exit-node0.json").read_text())["leftovers"] == []
    assert [command for pid, command in below.items() if alive(pid)] == []
    with closing(sqlite3.connect(run / "state.db")) as store:
        assert store.execute("SELECT count(*) FROM masters").fetchone() == (3,)
        assert store.execute("SELECT text FROM job WHERE name = 'stage'").fetchone() == ("succeeded",)
        assert {row[0] for row in store.execute("SELECT state FROM members")} == {"exited"}


def test_a_master_ends_with_an_agent_that_is_killed_together_with_its_guardian(
    tmp_path: Path, own_time: OwnTime
) -> None:
    """As on a machine that loses a control group: nobody is left who would end the master."""
    with launch(tmp_path, "--steps", "1000", "--pace", "0.02") as job:
        job.wait_for("step 3")
        below = job.pids()
        guardian, agent, master = (job.pid_of(name) for name in ("guardian", "rlmesh.agent", "prime_master"))
        for pid in (agent, guardian):
            os.kill(pid, signal.SIGSTOP)
        for pid in (guardian, agent):
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        while alive(master):
            assert own_time.since(began) < 2.0, "the master still runs"
            time.sleep(0.01)
        job.wait_for("ended without a report")
        assert job.ended() != 0
        assert [command for pid, command in below.items() if alive(pid)] == []


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("toy started", "pid of ADDER:0", "teardown of ADDER")),
        "step 9",
    ],
)
def test_a_master_that_is_killed_at_any_stage_loses_no_step(moment: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--steps", "10", "--pace", "0.01") as job:
        job.wait_for(moment)
        kill_master(job)
        assert job.ended() == 0, job.output
    assert steps_of(run_of(tmp_path)) == list(range(10))


def test_member_that_dies_without_a_master_is_told_to_the_next_one(tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60", "--restart", "never") as job:
        pid = int(job.wait_for(r"pid of ADDER:1 is (\d+)")[1])
        job.wait_for("step 1")
        kill_master(job)
        os.kill(pid, signal.SIGKILL)
        assert job.ended() == 1, job.output
        assert f"First cause:\n  ADDER:1 (pid {pid} on {os.uname().nodename}) was killed by SIGKILL" in job.output
        assert "pid of ADDER:1" in job.output.partition("last lines of")[2]


def test_master_that_dies_again_and_again_ends_the_job_with_the_first_cause(tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        killed: list[int] = []
        deadline = time.monotonic() + 25.0
        while job.process.poll() is None and time.monotonic() < deadline:
            for pid, command in job.pids().items():
                if "prime_master" in command and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.05)
        assert job.ended() == 1, job.output
        assert len(killed) == 6
        assert f"first it killed by SIGKILL (pid {killed[0]})" in job.output, job.output


def test_ctrl_c_while_there_is_no_master(tmp_path: Path, own_time: OwnTime) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        below = job.pids()
        kill_master(job)
        began = time.monotonic()
        job.interrupt()
        assert job.ended() == 130, job.output
        assert own_time.since(began) < 5.0
        assert [command for pid, command in below.items() if alive(pid)] == []
