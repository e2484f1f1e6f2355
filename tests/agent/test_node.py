"""What a machine offers, read from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmesh.agent.node import Machine


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Machine:
    found = Machine(tmp_path / "proc", tmp_path / "cg", tmp_path / "dev")
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
def test_limits_of_control_groups(tmp_path: Path, cgroup: str, files: dict[str, str], cpus: int, memory: int) -> None:
    found = machine(tmp_path, cgroup, files)
    assert (found.cpus(), found.memory_bytes()) == (cpus, memory)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [(None, ["GPU-aa", "GPU-bb"]), ("1", ["GPU-bb"]), ("1,0", ["GPU-bb", "GPU-aa"]), ("", []), ("GPU-b", ["GPU-bb"]),
     ("0,7,1", ["GPU-aa"]), ("-1", [])],
)  # fmt: skip
def test_gpus_that_are_hidden_or_cannot_be_opened_do_not_count(
    tmp_path: Path, mask: str | None, shown: list[str]
) -> None:
    information = "Model: \t NVIDIA H100\nGPU UUID: \t GPU-{}\nDevice Minor: \t {}\n"
    gpus = {f"proc/driver/nvidia/gpus/0000:0{n}:00.0/information": information.format(u * 2, n)
            for n, u in enumerate("abc")}  # fmt: skip
    found = machine(tmp_path, "0::/\n", {**gpus, "dev/nvidia0": "", "dev/nvidia1": ""})
    assert [device.uuid for device in found.gpus(mask)] == shown
    assert [device.index for device in found.gpus(mask)] == list(range(len(shown)))
