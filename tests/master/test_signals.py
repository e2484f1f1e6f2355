"""Signals to ``rlmesh launch``: stops with grace, stops at a step of all ranks, and what is resumed after them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.master.launched import Launched, alive
from tests.own_time import OwnTime

JOB = Path(__file__).with_name("stop_job.py")
STARTED = r"rank {} at step 10\b"


def launch(folder: Path, *launch_options: str, job_options: tuple[str, ...] = ()) -> Launched:
    command = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--run-dir", "run", *launch_options]
    return Launched([*command, str(JOB), "--", *job_options], folder)


def running(job: Launched) -> None:
    for rank in (0, 1):
        job.wait_for(STARTED.format(rank))


def states(run: Path) -> list[int]:
    found = [json.loads((run / f"state.{rank}").read_text()) for rank in (0, 1)]
    assert all(state["step"] == state["own"] for state in found), found
    return [state["step"] for state in found]


def agent_log(run: Path) -> str:
    return (run / "logs" / "agent-0.log").read_text()


def last_end(run: Path) -> float:
    """When the last member ended, in seconds since the epoch. What the launcher does after that has no grace."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return float(max(entry["at"] for entry in events if entry["event"] == "MemberExited"))


def check_grace(folder: Path, own_time: OwnTime, needs_s: float, long_s: float, short_s: float) -> None:
    """Ranks that need ``needs_s`` seconds after SIGTERM: with a longer and with a shorter grace."""
    for grace_s in (long_s, short_s):
        run = folder / f"{grace_s:g}"
        run.mkdir()
        options = ("--deaf", "--needs", str(needs_s))
        with launch(run, "--grace", str(grace_s), job_options=options) as job:
            running(job)
            began = time.time()
            job.process.terminate()
            code = job.ended(grace_s + 10)
            took_s = last_end(run / "run") - began
            assert code == 128 + signal.SIGTERM, job.output
            assert sorted(re.findall(r"rank (\d) got SIGTERM", job.output)) == ["0", "1"], job.output
        done = sorted(path.name for path in (run / "run").glob("done.*"))
        killed = f"did not end within {grace_s:g} s of SIGTERM: SIGKILL"
        if grace_s > needs_s:
            assert done == ["done.0", "done.1"]
            assert needs_s <= took_s and own_time.of(took_s) < needs_s + 2
            assert killed not in agent_log(run / "run")
        else:
            assert done == []
            assert grace_s - 1 <= took_s and own_time.of(took_s) <= grace_s + 1
            assert agent_log(run / "run").count(killed) == 2
            # The launcher waits little longer than the grace: of one it may not hear in time that it was killed.
            told = re.search(rf"\(SIGKILL after {grace_s:g} s: (.*)\)", job.output)
            assert told and sorted(re.findall(r"TRAINER:\d", told[1])) == ["TRAINER:0", "TRAINER:1"], job.output


def check_usr1(folder: Path) -> None:
    """SIGUSR1 to the launcher: once to all ranks, one step for all."""
    with launch(folder) as job:
        running(job)
        job.process.send_signal(signal.SIGUSR1)
        assert job.ended() == 75, job.output
        assert "starts at step 0, resume None" in job.output
        stops = re.findall(r"rank (\d) stops after step (\d+): SIGUSR1", job.output)
        assert sorted(rank for rank, _ in stops) == ["0", "1"], job.output
        assert len({step for _, step in stops}) == 1
        assert sorted(re.findall(r"USR1 of rank (\d), number (\d)", job.output)) == [("0", "1"), ("1", "1")]
        assert f"stopped after step {stops[0][1]}, all ranks at the same" in job.output
        assert job.output.count("teardown of rank") == 2
    step = int(stops[0][1])
    assert states(folder / "run") == [step, step]
    assert (folder / "run" / "server").read_text() == f"{step} SIGUSR1"


@pytest.mark.case("O11")
@pytest.mark.slow
def test_a_job_has_the_grace_that_it_was_given(tmp_path: Path, own_time: OwnTime) -> None:
    check_grace(tmp_path, own_time, needs_s=1.2, long_s=2.5, short_s=1.0)


@pytest.mark.slow
@pytest.mark.case("O11")
def test_a_job_has_a_grace_of_a_minute(tmp_path: Path, own_time: OwnTime) -> None:
    check_grace(tmp_path, own_time, needs_s=40.0, long_s=60.0, short_s=5.0)
    check_usr1(tmp_path)


@pytest.mark.case("O11")
def test_a_job_that_stopped_is_resumed_in_its_run_directory(tmp_path: Path) -> None:
    check_usr1(tmp_path)
    step = states(tmp_path / "run")[0]
    with launch(tmp_path, job_options=("--steps", str(step + 5))) as job:
        assert job.ended() == 0, job.output
        assert f"starts at step {step + 1}, resume Resume(count=1, step={step}, " in job.output
        assert "result succeeded" in job.output
    with launch(tmp_path, job_options=("--steps", "3")) as job:
        assert job.ended() == 0, job.output
        assert "resume None" in job.output, "it had succeeded: a new run"


def test_sigterm_after_two_notices_ends_the_job_wherever_it_is(tmp_path: Path) -> None:
    """SIGTERM after SIGUSR1 ends the job wherever it is; nothing is left."""
    with launch(tmp_path, "--grace", "1", job_options=("--deaf", "--needs", "30")) as job:
        running(job)
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", job.output)]
        job.process.send_signal(signal.SIGUSR1)
        job.process.send_signal(signal.SIGUSR1)
        job.process.terminate()
        assert job.ended() == 143, job.output
        assert not any(alive(pid) for pid in pids)


def test_signals_before_the_job_runs_end_the_script(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(30)\n")
    for number, code in ((signal.SIGUSR1, 75), (signal.SIGTERM, 143)):
        with Launched(["-m", "rlmesh.cli.main", "launch", str(script)], tmp_path) as job:
            job.wait_for("up")
            job.process.send_signal(number)
            assert job.ended() == code, job.output
            assert "while no job ran" in job.output


def test_notice_to_ranks_that_do_not_listen_ends_in_a_stop(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import time\nfrom rlmesh import DLJobBuilder\n\nclass Trainer:\n    def run(self):\n"
        "        print('up', flush=True)\n        time.sleep(60)\n\n"
        "if __name__ == '__main__':\n    builder = DLJobBuilder().device_type('CPU')\n"
        "    builder.role('TRAINER').run(Trainer)\n    builder.build().submit('stubborn')\n"
    )
    options = ["--view", "plain", "--run-dir", "run", "--stop-within", "0.5", "--grace", "1"]
    with Launched(["-m", "rlmesh.cli.main", "launch", *options, str(script)], tmp_path) as job:
        job.wait_for("up")
        os.kill(job.process.pid, signal.SIGUSR1)
        assert job.ended() == 75, job.output
        assert "TRAINER:0 was asked to stop, but is still in run() after 0.5 s" in job.output.replace("\n", " ")
