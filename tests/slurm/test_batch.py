"""Jobs that ``rlmesh launch --slurm`` submits to a real Slurm: to their end, stopped early, resumed, cancelled."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rlmesh.run_directory.discovery import running_jobs
from tests.master.launched import command
from tests.own_time import HANG_S
from tests.slurm.cluster import SlurmCluster
from tests.slurm.nodes import all_pids, is_of, lose_node, output, until_gone, wait_for

pytestmark = pytest.mark.slow

LAUNCH = (sys.executable, "-m", "rlmesh.cli.main", "launch", "--slurm")
STOPS = str(Path(__file__).parents[1] / "master" / "stop_job.py")
TWO = ("--nodes=2", "--output=out")
HET = "#SBATCH hetjob\n#SBATCH --nodes=1 --ntasks-per-node=1"
OPTIONS = ("--", "--ranks", "2", "--per-node", "1")


def submit(slurm: SlurmCluster, folder: Path, *words: str) -> str:
    said = slurm.run(*LAUNCH, *words, cwd=folder)
    found = re.match(r"Slurm job (\d+)\n", said)
    assert found, said
    assert f"squeue --job={found[1]}" in said
    return found[1]


def running(folder: Path) -> None:
    for rank in (0, 1):
        wait_for(folder, rf"rank {rank} at step \d*[1-9]0\b")


def stopped_step(folder: Path) -> int:
    """Where both ranks stopped the last time; they saved that step themselves."""
    (run,) = (folder / "runs").iterdir()
    states = [json.loads((run / f"state.{rank}").read_text()) for rank in (0, 1)]
    assert states[0] == states[1], states
    assert states[0]["step"] == states[0]["own"]
    return int(states[0]["step"])


def processes_of(folder: Path) -> list[int]:
    pids = [int(pid) for pid in re.findall(r"resume .*, pid (\d+)", output(folder))]
    assert pids
    return pids


def resume_now(slurm: SlurmCluster, job: str) -> None:
    """Slurm lets a requeued job wait for a while; tests do not."""
    slurm.wait_job(job, "PENDING", "RUNNING")
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)


def test_a_job_is_submitted_and_runs_to_its_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, *TWO, STOPS, *OPTIONS, "--steps", "20")
    assert slurm.wait_job(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "result succeeded" in output(tmp_path)


def test_a_job_that_fails_fails_in_slurm(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(9)\n")
    job = submit(slurm, tmp_path, *TWO, str(script))
    assert slurm.wait_job(job, "COMPLETED", "FAILED") == "FAILED"
    assert "ExitCode=9:0" in slurm.run("scontrol", "show", "job", job)


def test_what_sbatch_refuses_is_told(slurm: SlurmCluster, tmp_path: Path) -> None:
    said = slurm.run(*LAUNCH, "--partition=nowhere", STOPS, cwd=tmp_path, check=False)
    assert "sbatch refused the job: sbatch: error: invalid partition specified: nowhere" in said


def test_notice_then_requeue_then_resume(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, *TWO, "--requeue", STOPS, *OPTIONS)
    running(tmp_path)
    first = processes_of(tmp_path)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(tmp_path, r"stops after step", 2)
    until_gone(first)
    resume_now(slurm, job)
    wait_for(tmp_path, r"starts at step \d+, resume Resume\(.*\), pid \d+\n", 2)
    text = output(tmp_path)
    step = int(re.findall(r"stops after step (\d+)", text)[0])
    assert set(re.findall(r"stops after step (\d+)", text)) == {str(step)}
    resumed = re.findall(r"rank (\d) starts at step (\d+), resume Resume\(count=1, step=(\d+)[,)]", text)
    assert sorted(resumed) == [("0", str(step + 1), str(step)), ("1", str(step + 1), str(step))]
    for rank in (0, 1):
        wait_for(tmp_path, rf"Resume.*\n(?:.*\n)*.*rank {rank} at step \d*[1-9]0\b")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(tmp_path, r"stopped after step \d+, all ranks at the same", 2)
    assert stopped_step(tmp_path) > step
    slurm.run("scancel", job)
    slurm.wait_job(job, "CANCELLED")
    assert len(list((tmp_path / "runs").iterdir())) == 1, "one run directory for all starts"


def test_preemption_stops_requeues_and_resumes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job of a higher partition takes the nodes: SIGTERM to everybody is the notice."""
    job = submit(slurm, tmp_path, "--nodes=3", "--exclusive", "--output=out", "--requeue", STOPS, *OPTIONS)
    running(tmp_path)
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 2", "-o", "/dev/null",
        cwd=tmp_path,
    ).strip()  # fmt: skip
    wait_for(tmp_path, r"stops after step (\d+): SIGTERM", 2)
    wait_for(tmp_path, r"stopped after step \d+, all ranks at the same")
    slurm.wait_job(urgent, "RUNNING", "COMPLETED")
    step = stopped_step(tmp_path)
    slurm.wait_job(urgent, "COMPLETED")
    resume_now(slurm, job)
    wait_for(tmp_path, r"starts at step \d+, resume Resume\(.*\), pid \d+\n", 2)
    assert re.search(rf"rank 0 starts at step {step + 1}, resume Resume\(count=1, step={step}[,)]", output(tmp_path))
    slurm.run("scancel", job)
    slurm.wait_job(job, "CANCELLED")


def test_the_time_limit_is_noticed_before(slurm: SlurmCluster, tmp_path: Path) -> None:
    # Slurm looks every 30 s and may signal as much earlier: between 10 and 40 s after the start.
    job = submit(slurm, tmp_path, *TWO, "--time=1", "--signal=B:USR1@20", STOPS, *OPTIONS)
    running(tmp_path)
    assert slurm.wait_job(job, "FAILED", "TIMEOUT", timeout_s=80) == "FAILED"
    assert "ExitCode=75:0" in slurm.run("scontrol", "show", "job", job)
    assert stopped_step(tmp_path) > 0
    assert "stopped after step" in output(tmp_path)


def test_scancel_leaves_nothing_and_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, *TWO, "--requeue", STOPS, *OPTIONS)
    running(tmp_path)
    pids = processes_of(tmp_path)
    marks = [pid for pid in all_pids() if is_of(pid, job, slurm)]
    assert len(marks) >= len(pids)
    slurm.run("scancel", job)
    slurm.wait_job(job, "CANCELLED")
    until_gone([*pids, *marks])
    assert slurm.job_state(job) == "CANCELLED"
    assert not list(Path("/dev/shm").glob(f"rlm*stop*{job}*"))
    assert stopped_step(tmp_path) > 0, "and it has saved all the same"


def test_killed_at_once_leaves_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    """SIGKILL to all launchers, and nothing else: what Slurm does when its own patience ends."""
    job = submit(slurm, tmp_path, *TWO, STOPS, *OPTIONS)
    running(tmp_path)
    everybody = [pid for pid in all_pids() if is_of(pid, job, slurm)]
    launchers = [pid for pid in everybody if "rlmesh.cli.main launch" in command(pid)]
    assert launchers
    for pid in launchers:
        with suppress(ProcessLookupError):  # The first one's end may end another.
            os.kill(pid, signal.SIGKILL)
    until_gone(everybody)
    slurm.wait_job(job, "FAILED", "CANCELLED")
    # Slurm may kill a guardian too before it has cleaned up; what it left is removed by who looks for jobs next.
    deadline = time.monotonic() + HANG_S
    while running_jobs((os.environ["XDG_RUNTIME_DIR"],)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_lost_node_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rt-slurm-") as folder:
        Path(folder).chmod(0o755)
        with SlurmCluster(Path(folder)) as cluster:  # one of its own, since a node of it is lost
            job = submit(cluster, tmp_path, "--nodes=3", "--no-kill", "--output=out", STOPS, *OPTIONS, "--ranks", "3")
            running(tmp_path)
            everybody = [pid for pid in all_pids() if is_of(pid, job, cluster)]
            lose_node(cluster, job, 3)
            cluster.wait_job(job, "FAILED", "NODE_FAIL", "COMPLETED", timeout_s=90)
            assert "node3" in output(tmp_path)
            until_gone(everybody)
    for left in Path(os.environ["XDG_RUNTIME_DIR"]).glob("rlm-*"):
        shutil.rmtree(left, ignore_errors=True)  # of the node that is off: it loses its /run with its power


@pytest.mark.case("s01")
def test_one_element_of_an_array_is_requeued_and_resumes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The last one, whose number is the array's own."""
    words = ("--array=0-1", "--nodes=1", "--output=out-%a", "--requeue")
    said = slurm.run(*LAUNCH, *words, STOPS, cwd=tmp_path)
    array = re.findall(r"Slurm job (\d+)\n", said)[0]
    assert f"one element: {array}_INDEX" in said
    for element in (0, 1):
        wait_for(tmp_path, r"rank 0 at step \d*[1-9]0\b", name=f"out-{element}")
    slurm.run("scancel", "--batch", "--signal=USR1", f"{array}_1")
    wait_for(tmp_path, r"stops after step", 2, name="out-1")
    resume_now(slurm, f"{array}_1")
    wait_for(tmp_path, r"starts at step \d+, resume Resume\(count=1, step=\d+[,)]", 2, name="out-1")
    assert "stops after" not in output(tmp_path, "out-0") and "Resume(" not in output(tmp_path, "out-0")
    assert "Restarts=0" in slurm.run("scontrol", "show", "job", f"{array}_0")
    assert slurm.job_state(f"{array}_0") == "RUNNING"
    slurm.run("scancel", "--batch", "--signal=USR1", f"{array}_0")
    wait_for(tmp_path, r"stops after step", 2, name="out-0")
    slurm.wait_job(f"{array}_0", "PENDING")
    assert slurm.job_state(f"{array}_1") == "RUNNING"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"stop_job-{array}_{n}" for n in (0, 1)]


@pytest.mark.case("s01")
def test_a_heterogeneous_job_is_one_job_and_requeued_as_a_whole(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With a script of one's own: that of --slurm, over two components."""
    script = slurm.run(*LAUNCH, "--dry-run", "--nodes=1", "--requeue", "--output=out", STOPS, *OPTIONS, cwd=tmp_path)
    lines = script.splitlines()
    lines.insert(max(n for n, line in enumerate(lines) if line.startswith("#SBATCH")) + 1, HET)
    text = "\n".join(lines).replace("srun ", "srun --het-group=0,1 ") + "\n"
    (tmp_path / "het.sh").write_text(text)
    job = slurm.run("sbatch", "--parsable", "het.sh", cwd=tmp_path).strip()
    running(tmp_path)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(tmp_path, r"stops after step", 2)
    deadline = time.monotonic() + HANG_S
    while "Restarts=1" not in slurm.run("scontrol", "show", "job", job):
        assert time.monotonic() < deadline, output(tmp_path)
        time.sleep(0.2)
    assert stopped_step(tmp_path) > 0
    slurm.run("scancel", job)


def test_arrays_have_run_directories_of_their_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.run(*LAUNCH, "--array=0-1", "--nodes=1", "--output=out-%a", STOPS, "--", "--steps", "5", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while (
        not all("result succeeded" in p.read_text() for p in tmp_path.glob("out-*"))
        or len(list(tmp_path.glob("out-*"))) < 2
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len(list((tmp_path / "runs").iterdir())) == 2
