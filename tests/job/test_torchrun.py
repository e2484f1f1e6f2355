"""torchrun commands become elastic roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmesh import DLJobBuilder
from rlmesh.agent.processes.error_file import ERROR_FILE, read_error_file
from rlmesh.errors import JobFailed, JobSpecError
from rlmesh.job.entry_points.torchrun_command import TorchrunCommand, parse_torchrun
from rlmesh.testing import LocalCluster


@pytest.mark.case("s06")
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
        (
            "dlrover-run --node_check --network-check --nproc_per_node=2 train.py",
            TorchrunCommand(1, 2, 0, "train.py", node_check=True),
        ),
        (
            "dlrover-run --auto-config --node_unit 2 --nnodes=4 --precheck=0 --accelerator nvidia.com/gpu "
            "--exclude-straggler --save_at_breakpoint --auto-tunning --training_port=1 --numa-affinity train.py --x",
            TorchrunCommand(4, None, 0, "train.py --x", node_check=False),
        ),
        ("dlrover-run --precheck 2 train.py", TorchrunCommand(1, 1, 0, "train.py", node_check=True)),
    ],
)
def test_a_torchrun_command_is_parsed(command: str, expected: TorchrunCommand) -> None:
    assert parse_torchrun(command) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("mpirun -n 2 train.py", "is not a torchrun command"),
        ("torchrun --nproc_per_nod=2 train.py", "no option '--nproc_per_nod=2'. Did you mean 'nproc_per_node'?"),
        ("torchrun --nnodes=1:4 train.py", "a range of nodes is not supported"),
        ("torchrun --nnodes=2:20:30 train.py", "--nnodes=2:20:30: must be a whole number of at least 1"),
        ("torchrun --network-check train.py", "torchrun has no option '--network-check'"),
        ("dlrover-run --nodecheck train.py", "dlrover-run has no option '--nodecheck'. Did you mean 'node_check'?"),
        ("dlrover-run --nnodes=3 --node_unit=2 train.py", "--nnodes=3: must be a multiple of --node_unit=2"),
        ("dlrover-run --precheck=9 train.py", "--precheck=9: must be 0, 1 or 2"),
        ("dlrover-run --accelerator=ascend-npu train.py", "rlmesh knows GPUs of NVIDIA and CPUs"),
        ("torchrun --nnodes=two train.py", "--nnodes=two: must be a whole number of at least 1"),
        ("torchrun --nproc_per_node=0 train.py", "--nproc_per_node=0: must be a whole number of at least 1"),
        ("torchrun --no-python ./train", "name a Python script or a module"),
        ("torchrun --nnodes=1", "names no script"),
        ("torchrun --nnodes", "option '--nnodes' has no value"),
    ],
)
def test_a_wrong_torchrun_command_is_refused(command: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_torchrun(command)
    assert message in str(caught.value)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("")
    return path


@pytest.mark.case("s10")
def test_what_record_notes_is_the_cause(tmp_path: Path, script: Path) -> None:
    """A script that was written for torchrun: it notes its error, and ends by an exit code."""
    script.write_text(
        "import os, sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main(): raise ArithmeticError(f'diverged on rank {os.environ[\"RANK\"]}')\n"
        "try: main()\n"
        "except ArithmeticError: sys.exit(3)\n"
    )
    job = DLJobBuilder().by_run_cmd("torchrun train.py").build()
    with LocalCluster(run_root=tmp_path / "runs"), pytest.raises(JobFailed) as caught:
        job.submit("recorded")
    first = str(caught.value.exceptions[0])
    assert "exited with code 3" in first and "ArithmeticError: diverged on rank 0" in first
    assert caught.value.incident is not None
    (incident,) = Path(caught.value.run_dir, "incidents").glob("*.txt")
    assert "in main" in incident.read_text(), "its traceback"


@pytest.mark.case("s10")
@pytest.mark.parametrize(("text", "noted"), [
    ('{"message": {"message": "A: b", "extraInfo": {"py_callstack": "at c"}}}', ("A: b", "at c")),
    ('{"message": "as it was in old versions"}', ("as it was in old versions", "")),
    ('{"message": {"message": "A", "extraInfo": null}}', ("A", "")),
    ('{"message": 1}', ("", "")), ("[]", ("", "")), ('{"message": ', ("", "")), ("\0", ("", "")),
])  # fmt: skip
def test_an_error_file_is_read_unless_it_is_a_link(text: str, noted: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_error_file({ERROR_FILE: str(path)}) == noted
    link = tmp_path / "link"
    link.symlink_to(path)
    for other in ({}, {ERROR_FILE: ""}, {ERROR_FILE: str(tmp_path / "none")}, {ERROR_FILE: str(link)}):
        assert read_error_file(other) == ("", "")


def test_a_torchrun_command_makes_an_elastic_job(script: Path) -> None:
    job = DLJobBuilder().by_run_cmd("torchrun --nnodes=2 --nproc_per_node=3 train.py --lr 1").build()
    assert (job.node_number, job.device_per_node) == (2, 3)
    (workload,) = job.workloads.values()
    assert list(job.workloads) == ["ELASTIC"]
    assert (workload.backend, workload.total, workload.per_node) == ("elastic", 6, 3)
    assert workload.entry.script == str(script)
    assert workload.entry.args == ("--lr", "1")


def test_a_number_of_processes_that_is_left_to_the_machine_needs_device_per_node(script: Path) -> None:
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
