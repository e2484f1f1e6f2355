"""Jobs of a user who is not root, on a Slurm whose daemons are root's, as on any cluster."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.nodes import all_pids, is_of, lose_node, until_gone, wait_for
from tests.slurm.plain_user import PlainUser, plain_user, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]

STOPS = "master/stop_job.py"


@pytest.fixture
def user(leak_guard: None) -> Iterator[PlainUser]:
    """On three nodes of its own, of which one may be lost."""
    if absent := missing():
        pytest.skip(f"Slurm is not installed here ({absent}): apt-get install slurmctld slurmd slurm-client munge")
    with tempfile.TemporaryDirectory(prefix="rt-plain-") as folder:
        base = Path(folder)
        base.chmod(0o755)
        (base / "slurm").mkdir()
        with SlurmCluster(base / "slurm") as cluster, plain_user(base, cluster) as made:
            if isinstance(made, str):
                pytest.skip(made)
            yield made
            cluster.cancel_all()


def uids_of(pids: list[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError):  # It has ended since it was listed.
            found.add(os.stat(f"/proc/{pid}").st_uid)
    return found


def test_a_job_runs_over_three_nodes(user: PlainUser) -> None:
    words = ("--nodes=3", "--output=out", user.script(STOPS), "--", "--ranks", "3", "--per-node", "1")
    job = user.launch(*words, "--steps", "400")
    wait_for(user.folder, r"rank 2 at step \d*[1-9]0\b")
    own = [pid for pid in all_pids() if is_of(pid, job, user.cluster)]
    assert uids_of(own) == {user.uid}
    assert user.cluster.wait_job(job, "COMPLETED", "FAILED") == "COMPLETED", (user.folder / "out").read_text()
    said = (user.folder / "out").read_text()
    assert "3 tasks on 3 nodes (node1: 1, node2: 1, node3: 1)" in said and "result succeeded" in said
    until_gone(own)
    assert not list((user.folder / "run").iterdir()), "no socket is left"
    (run,) = (user.folder / "runs").iterdir()
    assert {path.stat().st_uid for path in run.rglob("*")} == {user.uid}
    assert not [path for path in run.rglob("*") if path.stat().st_mode & 0o022], "and nobody else may write there"


def test_a_job_that_may_not_restart_fails_with_its_node(user: PlainUser) -> None:
    words = ("--nodes=3", "--no-kill", "--output=out", "--restart=never", user.script(STOPS), "--")
    job = user.launch(*words, "--ranks", "3", "--per-node", "1")
    wait_for(user.folder, r"rank 2 at step \d*[1-9]0\b")
    everybody = [pid for pid in all_pids() if is_of(pid, job, user.cluster)]
    lose_node(user.cluster, job, 3)
    assert user.cluster.wait_job(job, "FAILED", "COMPLETED", timeout_s=90) == "FAILED"
    said = (user.folder / "out").read_text()
    assert "ExitCode=75:0" in user.cluster.run("scontrol", "show", "job", job), said
    assert re.search(r"First cause:\n.*node3", said), said
    until_gone(everybody)
