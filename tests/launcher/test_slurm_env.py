"""What Slurm's environment says, as text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlmesh.errors import LaunchError
from rlmesh_launcher.slurm import Names, SlurmAllocation, Task, show_hostnames

NODES = "n[001-003,007],gpu-a[1-2]b"
ENV = {
    "SLURM_JOB_NODELIST": NODES,
    "SLURM_TASKS_PER_NODE": "2(x3),1,4(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "24(x5),16",
}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``scontrol`` on PATH that counts its calls in the file that is given."""
    program, calls = tmp_path / "bin" / "scontrol", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$3" = bad ] && exit 1\necho x1; echo x2\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return calls


@pytest.mark.case("O12")
def test_an_allocation_is_read_without_scontrol(scontrol: Path) -> None:
    allocation = SlurmAllocation.read(ENV)
    assert allocation.nodes == ("n001", "n002", "n003", "n007", "gpu-a1b", "gpu-a2b")
    assert allocation.tasks == (2, 2, 2, 1, 4, 4)
    assert allocation.cpus == (24, 24, 24, 24, 24, 16)
    racks = SlurmAllocation.read({"SLURM_JOB_NODELIST": "rack[1-2]-n[01-02]"})
    assert racks.nodes == ("rack1-n01", "rack1-n02", "rack2-n01", "rack2-n02")
    assert not scontrol.exists(), "what can be read needs no scontrol"

    names = Names()
    for _ in range(3):  # a form that is not known: whatever Slurm may write one day
        assert SlurmAllocation.read({"SLURM_JOB_NODELIST": "x{1..2}[odd]"}, names).nodes == ("x1", "x2")
    assert scontrol.read_text() == "show hostnames x{1..2}[odd]\n"

    with pytest.raises(LaunchError) as caught:
        SlurmAllocation.read({**ENV, "SLURM_TASKS_PER_NODE": "2(x3),1,4"})
    assert NODES in str(caught.value)
    assert "2(x3),1,4" in str(caught.value)
    assert "6 nodes" in str(caught.value)
    assert "5 entries" in str(caught.value)


def test_scontrol_is_asked_once_and_its_words_are_told(scontrol: Path) -> None:
    names = Names()
    names.expand("[a")
    with pytest.raises(LaunchError, match="another list already"):
        names.expand("[b")
    with pytest.raises(LaunchError, match="nor by scontrol"):
        show_hostnames("bad")
    assert len(scontrol.read_text().splitlines()) == 2


def test_without_scontrol_the_list_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError(2, "No such file", "scontrol")

    with pytest.raises(LaunchError, match=r"'\[a' cannot be read, nor by scontrol show hostnames"):
        show_hostnames("[a", missing)


def test_a_step_counts_before_its_job() -> None:
    env = {**ENV, "SLURM_STEP_NODELIST": "n[001-002]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    allocation = SlurmAllocation.read(env)
    assert (allocation.nodes, allocation.tasks, allocation.cpus) == (("n001", "n002"), (4, 4), ())
    assert allocation.describe() == "8 tasks on 2 nodes (n001: 4, n002: 4)"
    with pytest.raises(LaunchError, match="not a process of a Slurm job"):
        SlurmAllocation.read({})
    with pytest.raises(LaunchError, match=r"SLURM_TASKS_PER_NODE: '2\(y3\)' is not a list"):
        SlurmAllocation.read({**ENV, "SLURM_TASKS_PER_NODE": "2(y3)"})


TASK = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1", "SLURM_GTIDS": "4,5,6,7", "SLURMD_NODENAME": "n2", "SLURM_STEP_GPUS": "1",
    "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_NAME": "ppo", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}  # fmt: skip


def test_a_task_knows_its_place() -> None:
    task = Task.read(TASK)
    assert task == Task("17", "0", 5, 8, 1, "n2", 1, 4, 0, "10.0.0.1", "ppo", "", "1")
    again = Task.read({**TASK, "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3"})
    assert again is not None
    assert (again.restarts, again.array) == (2, "15_3")
    assert (task.id, again.id) == ("17", "15_3")
    assert again.label == "task 5 of Slurm job 15_3.0 on n2"


@pytest.mark.case("s01")
def test_a_step_over_a_heterogeneous_job_is_one() -> None:
    """As Slurm 22.05 sets it in a task of the second component."""
    env = {
        "SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "1", "SLURM_JOB_ID_HET_GROUP_0": "1", "SLURM_JOB_ID_HET_GROUP_1": "2",
        "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
        "SLURM_TASKS_PER_NODE": "2,1(x2)", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_NODEID": "1",
        "SLURM_STEP_ID": "0", "SLURM_GTIDS": "2", "SLURMD_NODENAME": "n2", "SLURM_JOB_CPUS_PER_NODE": "2",
    }  # fmt: skip
    task = Task.read(env)
    assert task is not None and (task.id, task.rank, task.size, task.local_size) == ("1", 2, 4, 1)
    assert SlurmAllocation.read(env) == SlurmAllocation(("n1", "n2", "n3"), (2, 1, 1))


def test_a_batch_script_is_no_task() -> None:
    assert Task.read({**TASK, "SLURM_STEP_ID": ""}) is None
    assert Task.read({}) is None
    with pytest.raises(LaunchError, match="SLURM_PROCID='x' is not a number"):
        Task.read({**TASK, "SLURM_PROCID": "x"})
