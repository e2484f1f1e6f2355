"""``rlmesh plan``: where members would run, on clusters that are only described."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlmesh import DLJob, DLJobBuilder
from rlmesh.cli.main import main
from rlmesh.errors import PlacementError, UsageError
from rlmesh.placement.describe import describe_plan
from rlmesh.testing import LocalCluster
from tests.own_time import OwnTime

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from rlmesh import DLJobBuilder

class Role:
    def run(self): ...

if __name__ == "__main__":
    builder = DLJobBuilder()
    builder.role("rollout").run(Role).total(int(sys.argv[1])).resource(accelerator=1, cpu=int(sys.argv[2]))
    if len(sys.argv) > 3:
        builder.role("pinned").run(Role).on_nodes(sys.argv[3])
    builder.build().submit("job")
    print("it was submitted")
"""

CLUSTER = """
[[nodes]]
name = "A"
gpus = 8
cpus = 4

[[nodes]]
name = "B"
cpus = 64
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_plan_does_not_know_is_for_the_script(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that stands behind the script, as for launch; but for one ``--`` directly behind it."""
    (files / "job.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert main(["plan", "--cluster", "cluster.toml", "job.py", "--", "--cluster", "x", "-x", "--", "--json"]) == 1
    assert capsys.readouterr().out == "['--cluster', 'x', '-x', '--', '--json']\n"


def plan(capsys: pytest.CaptureFixture[str], *words: str, options: Sequence[str] = ()) -> tuple[int, str, str]:
    code = main(["plan", *options, "--cluster", "cluster.toml", "job.py", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.case("O13")
@pytest.mark.usefixtures("files")
def test_too_few_cores_are_told_beside_too_few_gpus(capsys: pytest.CaptureFixture[str], own_time: OwnTime) -> None:
    began = time.monotonic()
    code, out, err = plan(capsys, "--", "8", "2")
    assert own_time.since(began) < 1.0
    assert (code, out) == (1, "")
    table = [line.split() for line in err.splitlines()]
    assert table[1] == ["role", "wants", "A", "B", "nodes"]
    assert "CPU 16 wanted, 4 there" in err
    assert "GPU 8 wanted, 0 there" in err


@pytest.mark.case("O13")
@pytest.mark.usefixtures("files")
def test_one_gpu_too_many_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, "--", "9", "0")
    assert code == 1
    assert "GPU 9 wanted, 8 there" in err


@pytest.mark.case("O13")
@pytest.mark.usefixtures("files")
def test_a_role_bound_to_a_node_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, "--", "1", "0", "C")
    assert code == 1
    assert "role pinned is bound to node C, which the cluster does not have; its nodes are A, B" in err


@pytest.mark.case("O13")
def test_an_impossible_job_starts_nothing(files: Path, own_time: OwnTime) -> None:
    """As a user meets it: the command, on a machine without a GPU, and what is left afterwards."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    began = time.monotonic()
    argv = [sys.executable, "-m", "rlmesh.cli.main", "launch", "job.py", "--", "1", "0"]
    result = subprocess.run(argv, cwd=files, env=env, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1, result.stderr
    assert "no node has a GPU" in result.stderr
    assert "device_type('CPU')" in result.stderr
    assert not (files / "runs").exists()
    assert own_time.since(began) < 10.0


@pytest.mark.usefixtures("files")
def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--", "2", "2")
    assert code == 0
    assert "job: 2 members on 1 of 2 nodes" in out
    assert "0 GPU-A-0  rollout:0 1" in out
    assert "it was submitted" not in out
    code, out, _ = plan(capsys, "--", "2", "2", options=["--json"])
    found = json.loads(out)
    assert [(m["role"], m["rank"], m["node"], m["devices"][0]["milli"]) for m in found["members"]] == [
        ("rollout", 0, "A", 1000), ("rollout", 1, "A", 1000)
    ]  # fmt: skip


def test_plan_tells_wrong_arguments_clusters_and_jobs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nothing.py"]) == 2
    (files / "cluster.toml").write_text('[[nodes]]\nnaem = "A"\ncpus = "many"\nnvlink = "some"\n')
    code, _, err = plan(capsys, "--", "1", "0")
    assert code == 2
    assert "nodes[0].naem: there is no such key. Did you mean 'name'" in err
    assert "cpus='many'" in err
    assert "nvlink='some'" in err
    (files / "job.py").write_text("print('no job')")
    (files / "cluster.toml").write_text(CLUSTER)
    code, _, err = plan(capsys)
    assert code == 1
    assert "submitted no job" in err


class Role:
    def run(self) -> None: ...


def ppo() -> DLJob:
    builder = DLJobBuilder()
    builder.role("TRAINER").run(Role).resource(cpu=4)
    builder.role("ACTOR").train(Role).nnodes(2).nproc_per_node(4).resource(accelerator=1, cpu=2)
    builder.role("ROLLOUT").run(Role).with_groups(
        prefill={"total": 2, "accelerator": 2},
        decode={"total": 8, "accelerator": 0.5},
    )
    builder.with_separation("ROLLOUT/prefill", "ACTOR", by="node")
    return builder.build()


def test_a_job_is_planned_for_a_described_cluster() -> None:
    nodes = {"nodes": [{"name": "g", "count": 4, "gpus": 4, "cpus": 32, "numa": 2, "nvlink": "pairs"}]}
    plan = ppo().plan(nodes)
    assert plan == ppo().plan(nodes)
    text = describe_plan(plan)
    assert "19 members on 4 of 4 nodes" in text
    assert "0 GPU-g-0-0  ROLLOUT:0 1" in text
    prefill = [p for p in plan.of("ROLLOUT") if p.group == "prefill"]
    assert [(p.rank, [s.device.index for s in p.devices]) for p in prefill] == [(0, [0, 1]), (1, [2, 3])]
    assert {p.node_rank for p in prefill} & {p.node_rank for p in plan.of("ACTOR")} == set()
    assert [str(p.binding) for p in prefill] == ["NUMA 0 (CPUs 0-15)", "NUMA 1 (CPUs 16-31)"]
    big = ppo().plan({"nodes": [{"name": "g", "count": 40, "gpus": 4, "cpus": 32}]})
    assert "g-5 … g-39 (35): 4 gpu, 32 CPUs: nothing" in describe_plan(big)


def test_faults_of_a_described_cluster_are_named() -> None:
    with pytest.raises(UsageError, match="nodes: must be a list"):
        ppo().plan({"nodes": 3})
    with pytest.raises(UsageError, match="g is there twice"):
        ppo().plan({"nodes": [{"name": "g"}, {"name": "g"}]})
    with pytest.raises(UsageError, match="cluster file"):
        ppo().plan("/no/such/file.toml")


def test_this_machine_is_the_cluster_unless_another_is_given() -> None:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("A").run(Role).total(3)
    plan = builder.build().plan()
    assert [p.devices[0].device.uuid for p in plan.placements] == ["virtual-0", "virtual-1", "virtual-2"]


def test_a_local_cluster_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, devices_per_node=1, run_root=tmp_path), pytest.raises(PlacementError):
        ppo().submit("too_big")
    assert list(tmp_path.iterdir()) == []
