"""A job in a real allocation of three nodes, one of which loses its power: the job goes on without it, or says why not.

Each test has a Slurm of its own, since a node of it is lost.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.test_node_loss import MOVING, nothing_ran_twice
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.nodes import all_pids, is_of, lose_node, output, until_gone, wait_for

AGAIN = str(Path(__file__).parents[1] / "launcher" / "again_job.py")

pytestmark = pytest.mark.slow

LAUNCH = (sys.executable, "-m", "rlmesh.cli.main", "launch", "--slurm", "--nodes=3", "--output=out")


@pytest.fixture
def cluster(leak_guard: None) -> Iterator[SlurmCluster]:
    if absent := missing():
        pytest.skip(f"Slurm is not installed here ({absent}): apt-get install slurmctld slurmd slurm-client munge")
    with tempfile.TemporaryDirectory(prefix="rt-slurm-") as folder:
        Path(folder).chmod(0o755)
        with SlurmCluster(Path(folder)) as made:
            yield made
            made.cancel_all()
    for left in Path(os.environ["XDG_RUNTIME_DIR"]).glob("rlm-*"):
        shutil.rmtree(left, ignore_errors=True)  # of the node that is off: it loses its /run with its power


def submit(cluster: SlurmCluster, folder: Path, *words: str, spares: int) -> str:
    """The job of `moving_job`, at work; its ROLLOUT is on the first two nodes."""
    (folder / "pulses").mkdir()
    own = ("--pulses", str(folder / "pulses"), "--end", str(folder / "end"), "--spares", str(spares))
    said = cluster.run(*LAUNCH, *words, str(MOVING), "--", *own, cwd=folder)
    found = re.match(r"Slurm job (\d+)\n", said)
    assert found, said
    wait_for(folder, "step 0 Actor")
    return found[1]


@pytest.mark.parametrize(
    ("spares", "actors", "trainers"),
    [
        # The group of the lost rank starts again as a whole; the driver, on the first node, keeps its process.
        pytest.param(1, r"\(0, 1\), \(2, 1\)", 1, id="on the spare one"),
        # The group is on the first and the third node; the driver was on the second.
        pytest.param(0, r"\(0, 0\), \(2, 0\)", 2, id="on the others"),
    ],
)
def test_the_job_goes_on_without_the_node(
    spares: int, actors: str, trainers: int, cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, spares=spares)
    everybody = [pid for pid in all_pids() if is_of(pid, job, cluster)]
    lose_node(cluster, job, 2)
    wait_for(tmp_path, r"Rollout \[\(0, 0\), \(2, 1\)\]")
    wait_for(tmp_path, rf"Actor \[{actors}\]")
    cluster.wait_node("node2", "down")
    assert cluster.job_state(job) == "RUNNING", "Slurm has given the node up, and not the job"
    steps = len(wait_for(tmp_path, r"step \d+ Rollout"))
    wait_for(tmp_path, r"step \d+ Rollout", steps + 5)
    (tmp_path / "end").touch()
    assert cluster.wait_job(job, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED", output(tmp_path)
    assert "ExitCode=0:0" in cluster.run("scontrol", "show", "job", job)
    assert "the job has succeeded" in output(tmp_path)
    assert len(set(re.findall(r"TRAINER is pid (\d+)", output(tmp_path)))) == trainers
    until_gone(everybody)
    nothing_ran_twice(tmp_path)


def test_without_room_the_job_is_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "--nodes=2", "--requeue", spares=0)
    lose_node(cluster, job, 2)
    wait_for(tmp_path, "cannot be moved to other nodes")
    cluster.wait_job(job, "PENDING")
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)


def test_a_job_that_has_lost_its_first_node_is_requeued_and_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The batch shell, srun and the head are gone with it."""
    cluster.env["RANKS_PER_NODE"] = "1"
    said = cluster.run(*LAUNCH, "--nodes=2", "--requeue", AGAIN, cwd=tmp_path)
    job = re.findall(r"Slurm job (\d+)\n", said)[0]
    wait_for(tmp_path, r"rank 1 has saved step 20")
    lose_node(cluster, job, 1)
    cluster.wait_job(job, "PENDING", timeout_s=90)
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
    found = wait_for(tmp_path, r"rank 1 starts at step (\d+), incarnation 0, node 1", 2)
    assert found[0] == "0" and int(found[1]) > 20, "and what was printed before is not printed again"
    assert "BatchHost=node2" in cluster.run("scontrol", "show", "job", job)


def test_a_job_that_may_not_be_requeued_does_not_stand_there_without_its_first_node(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, spares=1)
    lose_node(cluster, job, 1)
    assert cluster.wait_job(job, "CANCELLED", "FAILED", "NODE_FAIL", timeout_s=90) == "CANCELLED", output(tmp_path)
