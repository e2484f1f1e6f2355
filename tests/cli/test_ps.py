"""``rlmesh ps``: which jobs run here, and who waits for whom."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from rlmesh.cli.commands.ps import pending_lines
from rlmesh.cli.main import main
from rlmesh.errors import UsageError
from rlmesh.job.status import MemberWaits, Serving, Waiting
from rlmesh.run_directory.discovery import RunningJob, find_job, running_jobs
from tests.master.launched import Launched, alive, descendants, launch
from tests.own_time import HANG_S

WAITING = Waiting("ADDER:1", "sleep", 12.34, 5.0, "connected; process 12 is stopped", "hm")
TRAINER = MemberWaits("TRAINER", 0, 11, "running", 4, (WAITING,), process="process 11 sleeps")
ADDER = MemberWaits("ADDER", 1, 12, "ready", None, (), (Serving("ADDER:1.sleep", 12.3, "TRAINER:0", True),))
SILENT = MemberWaits("ADDER", 0, 13, "ready", None, process="process 13 is stopped", error="CallTimeout: no answer")
IDLE = MemberWaits("CRITIC", 0, 14, "ready", None)


def test_what_is_printed() -> None:
    assert list(pending_lines([TRAINER, ADDER, SILENT, IDLE])) == [
        "  TRAINER:0  running  step 4  process 11 sleeps",
        "    waits for ADDER:1.sleep() for 12.3 s (connected; process 12 is stopped); its last line: hm",
        "  ADDER:1  ready  pid 12",
        "    ADDER:1.sleep() for TRAINER:0 runs for 12.3 s",
        "  ADDER:0  ready  process 13 is stopped",
        "    does not say whom it waits for: CallTimeout: no answer",
        "  nothing is pending at CRITIC:0",
    ]


def test_jobs_are_found_by_id_name_or_folder(tmp_path: Path) -> None:
    jobs = [RunningJob(f"toy-{n}", "toy", f"{tmp_path}/run{n}", "unix:///x", float(n), 1, tmp_path) for n in range(2)]
    assert find_job("toy-1", jobs) is jobs[1] and find_job(f"{tmp_path}/run0", jobs) is jobs[0]
    assert find_job(None, jobs[:1]) is jobs[0]
    with pytest.raises(UsageError, match=r"2 jobs run here; name one by its id or run directory: toy-0 \("):
        find_job("toy", jobs)
    with pytest.raises(UsageError, match=r"no job 'other' runs here; running: toy-0"):
        find_job("other", jobs)
    with pytest.raises(UsageError, match="no job of yours runs on this machine"):
        find_job("toy", [])
    with pytest.raises(UsageError, match="job toy-0 has ended just now"):
        jobs[0].key()
    (tmp_path / "rlm-x" / "n0").mkdir(parents=True)
    (tmp_path / "rlm-x" / "n0" / "about.json").write_text('{"of": "another version"}')
    assert running_jobs((str(tmp_path),)) == []


def ps(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["ps", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def pid_of(job: Launched, who: str) -> int:
    return int(job.wait_for(rf"pid of {who} is (\d+)").group(1))


def test_a_running_job_is_listed_with_its_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ps(capsys) == (0, "no job of yours runs on this machine\n")
    assert ps(capsys, "--pending")[0] == 2
    with launch(tmp_path, "--sleep", "60") as job:
        trainer, adder = pid_of(job, "TRAINER"), pid_of(job, "ADDER:1")
        job.wait_for("step 1")
        code, text = ps(capsys)
        assert code == 0 and re.fullmatch(r"toy-[0-9a-f]{8}  toy  for 0:\d\d  .*/runs/toy-\S+\n", text), text
        code, text = ps(capsys, "toy")
        assert code == 0 and re.search(rf"TRAINER:0  running  pid {trainer}  step 1", text), text
        os.kill(adder, signal.SIGSTOP)
        time.sleep(0.05)
        code, text = ps(capsys, "toy", "--pending")
        os.kill(adder, signal.SIGCONT)
        assert code == 0
        assert re.search(rf"TRAINER:0  running  step 1  process {trainer} sleeps\n    waits for ADDER:0", text), text
        whom = rf"waits for ADDER:1\.sleep\(\) for \d+\.\d s \(connected; process {adder} is stopped\)"
        assert re.search(whom + r"; its last line: pid of ADDER:1", text), text
        assert "ADDER:0.sleep() for TRAINER:0 runs for " in text
        assert re.search(rf"ADDER:1  ready  process {adder} is stopped\n    does not say whom it waits for", text), text
        job.interrupt()
        assert job.ended() == 130
    assert ps(capsys) == (0, "no job of yours runs on this machine\n")
    assert ps(capsys, "toy")[0] == 2


def test_a_job_whose_processes_were_all_killed_at_one_stroke_is_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usually one of them outlives the others, and cleans up."""
    base = Path(os.environ["XDG_RUNTIME_DIR"])
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        (about,) = base.glob("rlm-*/n0/about.json")
        everybody = [job.process.pid, *descendants(job.process.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in everybody:
                with suppress(ProcessLookupError):  # the end of its parent ended it, and somebody has reaped it
                    os.kill(pid, number)
        job.ended()
    deadline = time.monotonic() + HANG_S
    while any(map(alive, everybody)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ps(capsys) == (0, "no job of yours runs on this machine\n")
    assert not about.parents[1].exists(), "and what it left is gone"


@pytest.mark.slow
def test_the_next_job_removes_what_a_launch_left_that_was_killed_before_its_guardian_began(tmp_path: Path) -> None:
    left = Path(os.environ["XDG_RUNTIME_DIR"], "rlm-left")
    left.mkdir(0o700)
    (left / "n0").mkdir(0o700)
    about = RunningJob("left-1", "left", str(tmp_path), "unix:///x", time.time() - 60.0, 1 << 22, left / "n0")
    values = {key: value for key, value in asdict(about).items() if key != "folder"}
    (left / "n0" / "about.json").write_text(json.dumps(values))
    (left / "job").write_text("")
    with launch(tmp_path) as job:
        assert job.ended() == 0
    assert not left.exists()
