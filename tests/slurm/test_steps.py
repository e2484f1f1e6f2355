"""``srun rlmesh launch`` on a real Slurm, in both shapes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slow

LAUNCH = (sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain")
SHAPES = str(Path(__file__).with_name("shape_job.py"))
STOPS = str(Path(__file__).parents[1] / "master" / "stop_job.py")


def facts_of(folder: Path) -> list[dict[str, Any]]:
    (run,) = (folder / "runs").iterdir()
    facts: list[dict[str, Any]] = json.loads((run / "facts.json").read_text())
    return facts


def test_one_task_per_node_makes_one_agent_per_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    said = slurm.run("srun", "-N3", "--gpus-per-node=2", *LAUNCH, SHAPES, cwd=tmp_path)
    assert "3 tasks on 3 nodes (node1: 1, node2: 1, node3: 1)" in said
    facts = facts_of(tmp_path)
    assert sorted(fact["slurm_node"] for fact in facts) == ["node1", "node2", "node3"]
    assert [fact["node"] for fact in facts] == [fact["slurm_node"] for fact in facts]
    assert {fact["gpus"] for fact in facts} == {"0,1"}
    for rank, fact in enumerate(facts):  # each machine's own members by its sockets, the others' over the network
        others = {name: scheme for name, scheme in fact["schemes"].items() if name.startswith("MEMBER")}
        assert others == {f"MEMBER:{n}": "unix" if n == rank else "tcp" for n in range(3)}
    assert not (tmp_path / ".rlmesh").exists()
    assert all(json.loads(path.read_text())["leftovers"] == [] for path in tmp_path.glob("runs/*/exit-node*.json"))


def test_one_task_per_gpu_makes_one_group_of_agents_per_machine(slurm: SlurmCluster, tmp_path: Path) -> None:
    shape = ("-N2", "--ntasks-per-node=2", "--gpus-per-task=1")
    said = slurm.run("srun", *shape, *LAUNCH, SHAPES, "--", "--members", "4", cwd=tmp_path)
    assert "4 tasks on 2 nodes (node1: 2, node2: 2)" in said
    facts = facts_of(tmp_path)
    assert sorted((fact["slurm_node"], fact["gpus"]) for fact in facts) == [
        ("node1", "0"), ("node1", "1"), ("node2", "0"), ("node2", "1"),
    ]  # fmt: skip
    for fact in facts:  # the agents of one machine are a group: their members talk by sockets and shared memory
        near = {n for n, other in enumerate(facts) if other["slurm_node"] == fact["slurm_node"]}
        members = {name: scheme for name, scheme in fact["schemes"].items() if name.startswith("MEMBER")}
        assert members == {f"MEMBER:{n}": "unix" if n in near else "tcp" for n in range(4)}


def test_the_key_from_the_environment_stays_there(slurm: SlurmCluster, tmp_path: Path) -> None:
    env = {"RLMESH_KEY": os.urandom(32).hex(), "RLMESH_MUNGE_SOCKET": "/nowhere"}
    process = slurm.start(["srun", "-N2", *LAUNCH, SHAPES, "--", "--members", "2"], tmp_path, env)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert [fact["key"] for fact in facts_of(tmp_path)] == [[], []]


def test_without_a_key_and_munge_the_error_names_the_ways(slurm: SlurmCluster, tmp_path: Path) -> None:
    process = slurm.start(["srun", "-N2", *LAUNCH, SHAPES], tmp_path, {"RLMESH_MUNGE_SOCKET": "/nowhere"})
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "munge failed" in said
    assert "the head (task 0) gave up: " in said


def test_a_failure_ends_all_tasks_with_its_code(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit(7)\n")
    process = slurm.start(["srun", "-N3", *LAUNCH, str(script)], tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 7, said


def test_a_batch_script_without_srun_is_told_how(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = " ".join((*LAUNCH, SHAPES))
    slurm.run("sbatch", "-N2", "--wait", "-o", "out", f"--wrap={command}", cwd=tmp_path, check=False)
    assert "start it on all of them by `srun rlmesh launch" in (tmp_path / "out").read_text()


def test_usr1_to_the_tasks_stops_all_ranks_at_one_step(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = ("--ranks", "4", "--per-node", "2")
    process = slurm.start(["srun", "-N2", *LAUNCH, STOPS, "--", *options], tmp_path)
    assert process.stdout is not None
    said, job = "", ""
    for line in process.stdout:
        said += line
        if (found := re.search(r"Slurm job (\d+):", line)) is not None:
            job = found[1]
        if len(set(re.findall(r"rank (\d) at step 10\b", said))) == 4:
            break
    slurm.run("scancel", "--signal=USR1", job)
    rest, _ = process.communicate(timeout=60)
    said += rest
    assert process.returncode == 75, said
    assert len(set(re.findall(r"rank (\d) stops after step", said))) == 4, said
    assert len(set(re.findall(r"stops after step (\d+)", said))) == 1, said
    assert sorted(re.findall(r"USR1 of rank (\d), number (\d)", said)) == [(str(rank), "1") for rank in range(4)]
