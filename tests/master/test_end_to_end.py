"""Jobs from submit to the last process's end, as users run them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from rlmesh.errors import JobFailed, PlacementError
from rlmesh.testing import LocalCluster
from tests.master import toy_job
from tests.master.launched import TOY, Launched, alive, launch
from tests.own_time import OwnTime


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def test_script_runs_a_job(tmp_path: Path) -> None:
    with Launched([str(TOY)], tmp_path) as job:
        assert job.ended() == 0, job.output
        assert "TRAINER:0 | step 1: total 55, ranks ['0', '1']" in job.output
        assert "ADDER:1 | teardown of ADDER:1" in job.output
        run = only_run(tmp_path)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [(r["step"], r["metrics"]) for r in records] == [(0, {"total": 55.0}), (1, {"total": 55.0})]
        assert "pid of TRAINER" in (run / "logs" / "TRAINER-0.log").read_text()
        assert json.loads((run / "job.json").read_text())["workloads"]["ADDER"]["total"] == 2


def test_launch_runs_the_same_script(tmp_path: Path) -> None:
    with launch(tmp_path) as job:
        assert job.ended() == 0, job.output
        assert "TRAINER:0 | step 1: total 55" in job.output
        assert "all serving after" in job.output


@pytest.mark.slow
def test_a_job_runs_on_virtual_nodes(tmp_path: Path) -> None:
    job = toy_job.build(steps=1)
    with LocalCluster(nodes=2, devices_per_node=2, run_root=tmp_path):
        result = job.submit("virtual")
    assert result.status.stage == "succeeded"
    assert {m.state for m in result.status.members} == {"exited"}
    assert len({m.node_rank for m in result.status.members}) == 2
    assert len(result.exit_reports) == 2
    assert all(report.clean for report in result.exit_reports)


def test_impossible_job_fails_before_anything_starts(tmp_path: Path) -> None:
    job = toy_job.build()
    job.workloads["ADDER"].resource.accelerator = 1
    with LocalCluster(nodes=3, devices_per_node=1, run_root=tmp_path), pytest.raises(PlacementError) as caught:
        job.submit("too-big")
    assert "slot 2 wanted, 1 there" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("place", "said"), [
    ("init", "ADDER:1 (pid"),
    ("setup", "could not be set up: ValueError: no luck in setup"),
    ("run", "failed in run(): ValueError: no luck in run"),
    ("method", "no luck in method"),
    ("teardown", "failed in teardown(): ValueError: no luck in teardown"),
])  # fmt: skip
def test_a_failure_of_the_users_code_is_told_with_its_place(place: str, said: str, tmp_path: Path) -> None:
    with LocalCluster(run_root=tmp_path), pytest.raises(JobFailed) as caught:
        toy_job.build(fail=place).submit(place)
    text = str(caught.value.exceptions[0])
    assert said in text, text
    assert f"no luck in {place}" in text
    assert "toy_job.py" in text
    assert Path(caught.value.run_dir).is_dir()


def test_method_that_exits_is_named(tmp_path: Path) -> None:
    with LocalCluster(run_root=tmp_path), pytest.raises(JobFailed) as caught:
        toy_job.build(fail="exit").submit("exit")
    # By its agent, or by the trainer that got the answer, whichever is heard first.
    text = str(caught.value.exceptions[0])
    said = r"ADDER:\d .* exited with code 3|TRAINER:0 .*RemoteError: SystemExit: 3 \[raised by ADDER:\d"
    assert re.match(said, text), text


@pytest.mark.parametrize("who", ["ADDER:1", pytest.param("TRAINER", marks=pytest.mark.slow)])
def test_killed_member_fails_the_job_within_two_seconds(who: str, tmp_path: Path, own_time: OwnTime) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        pid = int(job.wait_for(rf"pid of {who} is (\d+)").group(1))
        job.wait_for("step 1")
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        code = job.ended()
        took_s = own_time.since(began)
        name = who if ":" in who else f"{who}:0"
        assert code == 1
        how = f"{name} (pid {pid} on {os.uname().nodename}) was killed by SIGKILL"
        assert f"First cause:\n  {how}" in job.output, job.output
        assert f"pid of {who} is {pid}" in job.output.partition("last lines of")[2], job.output
        assert took_s < 2.0


@pytest.mark.parametrize(("who", "said"), [
    ("-m rlmesh.agent", "the agent of node"),
    ("guardian.py", "the guardian of node"),
])  # fmt: skip
def test_the_death_of_the_jobs_own_processes_ends_the_job_and_is_told(
    who: str, said: str, tmp_path: Path, own_time: OwnTime
) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        below = job.pids()
        os.kill(job.pid_of(who), signal.SIGKILL)
        began = time.monotonic()
        assert job.ended() == 1, job.output
        assert said in job.output, job.output
        assert own_time.since(began) < 6.0
        assert [command for pid, command in below.items() if alive(pid)] == []


def test_the_death_of_the_driver_ends_all_processes(tmp_path: Path, own_time: OwnTime) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        below = job.pids()
        job.process.kill()
        job.ended()
        own_time.holds_within(5.0, lambda: not any(map(alive, below)))
        assert [command for pid, command in below.items() if alive(pid)] == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_job_in_time(times: int, tmp_path: Path, own_time: OwnTime) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        below = job.pids()
        began = time.monotonic()
        for _ in range(times):
            job.interrupt()
            time.sleep(0.3)
        assert job.ended() == 130, job.output
        assert own_time.since(began) < 5.0
        assert [command for pid, command in below.items() if alive(pid)] == []
        assert not re.search(r"^Traceback", job.output, re.M), job.output


def test_ctrl_c_while_the_job_starts(tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("toy started")
        job.interrupt()
        assert job.ended() == 130, job.output


def test_start_is_quick(tmp_path: Path, own_time: OwnTime) -> None:
    """Goal: 1.5 s from submit to the first member that serves, without torch; 3 s leaves room for busy machines."""
    with LocalCluster(run_root=tmp_path):
        status = toy_job.build().submit("quick").status
    print(f"first serving {status.first_serving_s:.2f} s, all serving {status.all_serving_s:.2f} s")
    assert status.first_serving_s is not None
    assert own_time.of(status.first_serving_s) < 3.0
