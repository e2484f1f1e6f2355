"""What a machine offers, read from files as the kernel writes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rlmesh.placement.machine.inventory import NumaNode
from rlmesh.placement.machine.system import Machine, numbers


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Machine:
    found = Machine(tmp_path / "proc", tmp_path / "cg", tmp_path / "dev", tmp_path / "sys")
    files = {"proc/self/cgroup": cgroup, "proc/meminfo": "MemTotal:   1000 kB\nMemFree: 1 kB\n", **files}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return found


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("cgroup", "files", "cpus", "memory"),
    [
        ("0::/\n", {}, 8, 1_024_000),
        ("0::/a/b\n", {"cg/a/b/cpu.max": "max 100000", "cg/a/cpu.max": "250000 100000"}, 2, 1_024_000),
        ("0::/a\n", {"cg/a/memory.max": "500000\n", "cg/memory.max": "max"}, 8, 500_000),
        ("4:memory:/m\n1:cpu,cpuacct:/c\n0::/\n",
         {"cg/cpu,cpuacct/c/cpu.cfs_quota_us": "50000", "cg/cpu,cpuacct/c/cpu.cfs_period_us": "100000",
          "cg/memory/m/memory.limit_in_bytes": "9223372036854771712"}, 1, 1_024_000),
        ("1:cpu:/c\n", {"cg/cpu/cpu.cfs_quota_us": "-1", "cg/cpu/cpu.cfs_period_us": "100000"}, 8, 1_024_000),
    ],
)  # fmt: skip
def test_limits_of_control_groups_count(
    tmp_path: Path, cgroup: str, files: dict[str, str], cpus: int, memory: int
) -> None:
    found = machine(tmp_path, cgroup, files)
    assert (found.cpus(), found.memory_bytes()) == (cpus, memory)


@pytest.mark.usefixtures("eight_cpus")
def test_cpusets_narrow_the_affinity(tmp_path: Path) -> None:
    files = {"cg/a/cpuset.cpus.effective": "0-3,6\n", "cg/cpuset.cpus.effective": "0-7"}
    assert machine(tmp_path, "0::/a\n", files).cpu_ids() == {0, 1, 2, 3, 6}
    files = {"cg/cpuset/b/cpuset.cpus": "2-3\n"}
    assert machine(tmp_path / "v1", "3:cpuset:/b\n", files).cpu_ids() == {2, 3}


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("env", "cpus", "memory"),
    [
        ({"SLURM_CPUS_ON_NODE": "2"}, 8, 1_024_000),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "0"}, 4, 1_024_000),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "8", "SLURM_PROCID": "3", "SLURM_CPUS_PER_TASK": "2",
          "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 2, 1_024_000),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "8", "SLURM_PROCID": "1", "SLURM_CPUS_PER_TASK": "2",
          "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 8, 1_024_000),
    ],
)  # fmt: skip
def test_slurms_allocation_is_kept_to(tmp_path: Path, env: dict[str, str], cpus: int, memory: int) -> None:
    found = machine(tmp_path, "0::/\n", {})
    assert (found.cpus(env), found.memory_bytes(env)) == (cpus, memory)


def test_slurms_memory_counts_in_mib(tmp_path: Path) -> None:
    found = machine(tmp_path, "0::/\n", {"proc/meminfo": "MemTotal:   80000000 kB\n"})
    env = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}
    assert found.memory_bytes(env) == 2 * 2**30
    assert found.memory_bytes({**env, "SLURM_MEM_PER_NODE": "1024"}) == 2**30


@pytest.mark.usefixtures("eight_cpus")
def test_numa_nodes_hold_the_cpus_that_may_be_used(tmp_path: Path) -> None:
    folder = "sys/devices/system/node"
    files = {f"{folder}/node1/cpulist": "4-9\n", f"{folder}/node1/meminfo": "Node 1 MemTotal:  2000 kB\n",
             f"{folder}/node0/cpulist": "0-3\n", f"{folder}/node2/cpulist": "\n",
             f"{folder}/possible": "0-2"}  # fmt: skip
    found = machine(tmp_path, "0::/\n", files).numa()
    assert found == (NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7), 2_048_000), NumaNode(2, ()))
    assert machine(tmp_path / "one", "0::/\n", {f"{folder}/node0/cpulist": "0-7"}).numa() == ()


def test_lists_of_the_kernel_are_read() -> None:
    assert numbers("0-2,7\n") == (0, 1, 2, 7)
    assert numbers("") == numbers("x,-") == ()


def test_gpus_are_found_by_the_drivers_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the driver's files say which GPUs there are, and where; one that cannot be opened does not
    count."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    information = "Model: \t NVIDIA H100\nGPU UUID: \t GPU-{}\nDevice Minor: \t {}\n"
    gpus = {f"proc/driver/nvidia/gpus/0000:0{n}:00.0/information": information.format(u * 2, n)
            for n, u in enumerate("abc")}  # fmt: skip
    numa = {"sys/bus/pci/devices/0000:01:00.0/numa_node": "1\n", "sys/bus/pci/devices/0000:00:00.0/numa_node": "-1\n"}
    found = machine(tmp_path, "0::/\n", {**gpus, **numa, "dev/nvidia0": "", "dev/nvidia1": ""})
    devices, notes = found.devices({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [(d.uuid, d.bus_id, d.numa, d.model) for d in devices] == [
        ("GPU-aa", "00000000:00:00.0", None, "NVIDIA H100"), ("GPU-bb", "00000000:01:00.0", 1, "NVIDIA H100")
    ]  # fmt: skip
    assert "nvidia-ml-py" in notes[0]
    assert [d.uuid for d in found.devices({"CUDA_VISIBLE_DEVICES": "1"})[0]] == ["GPU-bb"]


def test_a_machine_without_driver_has_no_gpus_and_says_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/\n", {}).devices({}) == ((), ())


def test_this_machine_can_be_read() -> None:
    found = Machine()
    assert 1 <= found.cpus() <= len(os.sched_getaffinity(0))
    assert found.memory_bytes() > 2**28
    assert found.cpu_ids() <= os.sched_getaffinity(0)
