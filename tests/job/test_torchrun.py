"""torchrun commands become elastic roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmesh import DLJobBuilder
from rlmesh.errors import JobSpecError
from rlmesh.job.torchrun import TorchrunCommand, parse_torchrun


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun train.py", TorchrunCommand(1, 1, 0, "train.py")),
        (
            "torchrun --nnodes=2 --nproc_per_node=4 train.py --lr 1 --nnodes=9",
            TorchrunCommand(2, 4, 0, "train.py --lr 1 --nnodes=9"),
        ),
        (
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend=c10d --rdzv_endpoint host:29400 -r 3 train.py",
            TorchrunCommand(2, 4, 0, "train.py"),
        ),
        ("python -m torch.distributed.run --standalone train.py", TorchrunCommand(1, 1, 0, "train.py")),
        ("/opt/bin/torchrun -m pkg.train --lr 1", TorchrunCommand(1, 1, 0, "-m pkg.train --lr 1")),
        ("torchrun --nproc_per_node=gpu --max-restarts=3 train.py", TorchrunCommand(1, None, 3, "train.py")),
        ("torchrun --nnodes=2:2 -- train.py 'two words'", TorchrunCommand(2, 1, 0, "train.py 'two words'")),
    ],
)
def test_commands(command: str, expected: TorchrunCommand) -> None:
    assert parse_torchrun(command) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("mpirun -n 2 train.py", "is no torchrun command"),
        ("torchrun --nproc_per_nod=2 train.py", "no option '--nproc_per_nod=2'. Did you mean 'nproc_per_node'?"),
        ("torchrun --nnodes=1:4 train.py", "a range of nodes is not supported"),
        ("torchrun --nnodes=two train.py", "--nnodes=two: must be a whole number of at least 1"),
        ("torchrun --nproc_per_node=0 train.py", "--nproc_per_node=0: must be a whole number of at least 1"),
        ("torchrun --no-python ./train", "name a Python script or a module"),
        ("torchrun --nnodes=1", "names no script"),
        ("torchrun --nnodes", "option '--nnodes' has no value"),
    ],
)
def test_wrong_commands(command: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_torchrun(command)
    assert message in str(caught.value)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_a_job_of_a_command(script: Path) -> None:
    job = DLJobBuilder().by_run_cmd("torchrun --nnodes=2 --nproc_per_node=3 train.py --lr 1").build()
    assert (job.node_number, job.device_per_node) == (2, 3)
    (workload,) = job.workloads.values()
    assert list(job.workloads) == ["ELASTIC"]
    assert (workload.backend, workload.total, workload.per_node) == ("elastic", 6, 3)
    assert workload.entry.script == str(script)
    assert workload.entry.args == ("--lr", "1")


def test_the_machine_s_number_of_processes(script: Path) -> None:
    builder = DLJobBuilder().device_per_node(4).role("SFT").by_run_cmd("torchrun --nproc_per_node=gpu train.py")
    assert builder.build().workloads["SFT"].total == 4
    with pytest.raises(JobSpecError, match="leaves the number to the machine"):
        DLJobBuilder().by_run_cmd("torchrun --nproc_per_node=gpu train.py").build()


@pytest.mark.parametrize(("options", "scope"), [("", "never"), ("--max_restarts=3 ", "role")])
def test_restarts_are_as_with_torchrun(options: str, scope: str, script: Path) -> None:
    """None unless asked for, and then also after an exception."""
    policy = DLJobBuilder().by_run_cmd(f"torchrun {options}train.py").build().restart_of("ELASTIC")
    assert (policy.scope, policy.on_error) == (scope, True)
    assert policy.max_restarts == (3 if options else 0)


def test_a_wrong_command_is_reported_once_with_the_other_faults() -> None:
    with pytest.raises(JobSpecError) as caught:
        DLJobBuilder().device_type("TPU").by_run_cmd("torchrun --nnode=2").build()
    assert len(caught.value.problems) == 2
